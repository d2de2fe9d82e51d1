"""AsyncLLM and the process of its core: its calls, its sleep, how it ended."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Coroutine
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from grmpipe.models.engines.vllm.options import VllmStart, describe_start, make_socket_folder, start_async_llm
from grmpipe.models.types import EngineDied

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
SHUTDOWN_S = 5.0  # before vLLM's processes are killed
LIVENESS_PERIOD_S = 0.2  # interval at which a waiting call checks whether vLLM is alive


class VllmProcess:
    """AsyncLLM and its processes. Blocks while vLLM starts.

    ids:     process ids of vLLM's engine core, which holds the model or starts the workers that do.
    started: what its start found.
    """

    def __init__(self, start: VllmStart, first_version: str) -> None:
        """first_version: what vLLM calls the weights that it starts with."""
        self._model_name, self._first_version = start.spec.role, first_version
        self._adapters = start.adapters
        self._sockets = make_socket_folder()
        began_s = time.monotonic()
        try:
            self._held = [start_async_llm(start, self._sockets.name)]
        except BaseException:
            self._sockets.cleanup()
            raise
        self.started = describe_start(self._held[0], time.monotonic() - began_s)
        self.close = weakref.finalize(self, _shut_down, self._held, self._sockets)  # also at exit
        manager = self.llm.engine_core.resources.engine_manager
        self._cores = list(manager.processes)
        self.ids = [core.pid for core in self._cores]
        self._introduction: asyncio.Task[None] | None = None
        self._awake = asyncio.Event()
        self._awake.set()

    @property
    def llm(self) -> AsyncLLM:
        """Raises EngineDied after it was closed."""
        if not self._held:
            raise self.death()
        return self._held[0]

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

    async def wait_until_ready(self) -> None:
        """Return once what comes before a first request is done."""
        if self._introduction is None:
            self._introduction = asyncio.create_task(self._introduce())
        await asyncio.shield(self._introduction)

    async def _introduce(self) -> None:
        """Once the loop runs: what vLLM asks its core before a first request, the name of its weights, and adapters
        that change nothing.
        """
        await self.call(self.llm.get_supported_tasks())
        self._sockets.cleanup()  # both ways are connected
        for number, (name, adapter) in enumerate(self._adapters.items(), 1):
            await self.ask_workers("begin_adapter", name, number, adapter.rank, adapter.alpha, adapter.path)
        if await self.call(self.llm.get_weight_version()) == "default":
            await self.call(self.llm.update_weight_version(self._first_version))

    async def ready(self) -> None:
        """Return once requests may be sent: not in its sleep."""
        await self.wait_until_ready()
        if not self._awake.is_set():
            await self.call(self._awake.wait())

    async def sleep(self) -> int:
        """Returns the bytes that became free."""
        before = await self.ask_workers("free_device_bytes")
        self._awake.clear()
        await self.call(self.llm.sleep(level=1, mode="keep"))
        after = await self.ask_workers("free_device_bytes")
        num_grown: int = max(0, sum(after) - sum(before))
        return num_grown

    async def wake(self) -> None:
        """Wake; it is paused then."""
        await self.call(self.llm.wake_up())
        await self.pause()  # waking vLLM also resumes it
        self._awake.set()

    async def resume(self) -> None:
        await self.call(self.llm.resume_generation())

    async def pause(self) -> None:
        await self.call(self.llm.pause_generation(mode="keep", clear_cache=False))

    def refuse_the_dead(self) -> None:
        if self.llm.errored:
            raise self.death()

    def death(self) -> EngineDied:
        if not self._held:
            return EngineDied(f"the engine of {self._model_name} was closed")
        ends = ", ".join(f"process {core.pid} {_end_of(core.exitcode)}" for core in self._cores)
        return EngineDied(f"the engine of {self._model_name} died: vLLM's {ends}")


def _shut_down(held: list[AsyncLLM], sockets: TemporaryDirectory[str]) -> None:
    """Run its destructor now: at the end of Python it would fail with a message."""
    llm = held.pop()
    llm.shutdown(timeout=SHUTDOWN_S)
    sockets.cleanup()


def _end_of(exit_code: int | None) -> str:
    if exit_code is None:
        return "failed with an error (see its log)"
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
