"""AsyncLLM and the process of its core: calls that end with it, and how it ended. Knows no requests or weights."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from models.engines.vllm.options import VllmStart, start_async_llm
from models.types import EngineDied

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
SHUTDOWN_S = 5.0  # before vLLM's processes are killed
LIVENESS_PERIOD_S = 0.2  # interval at which a waiting call checks whether vLLM is alive


class VllmProcess:
    """AsyncLLM and its processes. Blocks while vLLM starts."""

    def __init__(self, start: VllmStart, model_name: str) -> None:
        self._model_name = model_name
        self._held = [start_async_llm(start)]
        self._end = weakref.finalize(self, _shut_down, self._held)  # also at exit
        manager = self.llm.engine_core.resources.engine_manager
        self._cores = list(manager.processes)

    @property
    def llm(self) -> AsyncLLM:
        """Raises EngineDied after it was closed."""
        if not self._held:
            raise self.death()
        return self._held[0]

    @property
    def ids(self) -> list[int]:
        return [core.pid for core in self._cores]

    async def call(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call of AsyncLLM, which by itself would wait forever for a dead core."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=LIVENESS_PERIOD_S))[0]:
                self.refuse_the_dead()
            return task.result()
        except EngineDeadError as error:
            raise self.death() from error
        finally:
            task.cancel()

    async def ask_workers(self, method: str, *args: object) -> list[Any]:
        """Call a method of the workers' extension; answers by rank."""
        return await self.call(self.llm.collective_rpc(method, args=args))

    def refuse_the_dead(self) -> None:
        if self.llm.errored:
            raise self.death()

    def death(self) -> EngineDied:
        if not self._held:
            return EngineDied(f"the engine of {self._model_name} was closed")
        ends = ", ".join(f"process {core.pid} {_end_of(core.exitcode)}" for core in self._cores)
        return EngineDied(f"the engine of {self._model_name} died: vLLM's {ends}")

    def close(self) -> None:
        self._end()


def _shut_down(held: list[AsyncLLM]) -> None:
    """Run its destructor now: at the end of Python it would fail with a message."""
    llm = held.pop()
    llm.shutdown(timeout=SHUTDOWN_S)


def _end_of(exit_code: int | None) -> str:
    if exit_code is None:
        return "failed with an error (see its log)"
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
