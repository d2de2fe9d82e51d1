"""The embedded engine, in torch and in this process: async calls from any event loop, one thread that steps the batch.

    generate, abort, pause, load_bucket, ...  -> [commands] -> thread: commands between steps, then a step, again
    completions, receipts, first tokens       <- call_soon_threadsafe <-

The thread owns the worker; callers only post commands to it. So a pause is an ordinary command: when it runs, no token
is being sampled.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.context_limit import ContextLimit
from grmpipe.models.engines.embedded.embedded_worker import (
    Answer,
    Command,
    EmbeddedWorker,
    EngineStats,
    Waiter,
    copy_death,
)
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    GroupLink,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightReceipt,
    ignore_first_token,
)

T = TypeVar("T")


class EmbeddedEngine:
    """Continuous batching for any causal LM with full attention, on the CPU or one GPU.

    Callers handle deadlines by cancelling. Raises ValueError for a model that it can't run.
    """

    def __init__(self, spec: EngineSpec, config: EmbeddedConfig) -> None:
        renderer = Renderer.load(spec.path, spec.chat_template)
        self.model_name = spec.role
        self._window = ContextLimit.of(spec.role, renderer, config.max_context_tokens)
        self._worker = EmbeddedWorker(spec, config, renderer, self._window.tokens)
        self._closing = False
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._death: EngineDied | None = None
        self._death_lock = threading.Lock()  # no command may be added after the last ones were failed
        self._thread = threading.Thread(target=self._work, name=f"engine-{spec.role}", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._worker.version

    def stats(self) -> EngineStats:
        return self._worker.stats()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Sample one completion. A request_id that is already in flight gets that request's answer."""
        ids = tuple(prompt_ids)
        self._refuse_what_cannot_run(ids, params)
        waiter = Waiter(Answer[Completion](), on_first_token)
        self._post(Command(partial(self._worker.submit, ids, params, context, waiter), waiter.answer.fail))
        try:
            return await waiter.answer.future
        except asyncio.CancelledError:
            with contextlib.suppress(EngineDied):
                self._post(Command(partial(self._worker.give_up, context.request_id, waiter), lambda error: None))
            raise

    async def abort(self, request_id: str) -> None:
        await self._do(partial(self._worker.abort, request_id))

    def end_trajectory(self, trajectory_id: str) -> None:
        with contextlib.suppress(EngineDied):
            self._post(Command(partial(self._worker.end_trajectory, trajectory_id), lambda error: None))

    async def pause(self, adapter: str = "") -> None:
        await self._do(partial(self._worker.pause, adapter))

    async def resume(self, adapter: str = "") -> None:
        await self._do(partial(self._worker.resume, adapter))

    async def begin_weights(self, link: GroupLink | None = None, adapter: str = "") -> None:
        """Raises RuntimeError if not paused, ConnectionError if the group doesn't form in time."""
        await self._do(partial(self._worker.begin, link, adapter))

    async def load_bucket(self, bucket: WeightBucket, adapter: str = "") -> None:
        """Raises ValueError that names a tensor that doesn't fit (nothing is loaded), RuntimeError if not paused."""
        await self._do(partial(self._worker.load, bucket, adapter))

    async def commit_weights(self, version: int, adapter: str = "") -> WeightReceipt:
        return await self._do(partial(self._worker.commit, version, adapter))

    async def score(self, token_ids: Sequence[int], adapter: str = "") -> tuple[float, ...]:
        ids = tuple(token_ids)
        self._window.check_text(ids)
        return await self._do(partial(self._worker.score, ids, adapter))

    async def sleep(self) -> int:
        """Raises RuntimeError if requests are in flight, or not paused. On a CPU the weights stay: they are on the host
        already.
        """
        return await self._do(self._worker.sleep)

    async def wake(self) -> None:
        """Wake; the engine stays paused."""
        await self._do(self._worker.wake)

    def close(self) -> None:
        """End the thread; waiters get EngineDied. Blocks for one step at most."""
        with self._death_lock:
            if self._death is None:
                self._commands.put(Command(self._close, lambda error: None))
        self._thread.join()

    async def _do(self, function: Callable[[], T]) -> T:
        answer = Answer[T]()

        def run() -> None:
            try:
                answer.give(function())
            except Exception as error:
                answer.fail(error)  # the caller's mistake; the engine stays alive

        self._post(Command(run, answer.fail))
        return await answer.future

    def _post(self, command: Command) -> None:
        with self._death_lock:
            if self._death is not None:
                raise EngineDied(str(self._death)) from self._death.__cause__
            self._commands.put(command)

    def _refuse_what_cannot_run(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> None:
        self._window.check_request(prompt_ids, params)
        if params.pattern is not None:
            try:
                self._worker.grammar.check(params.pattern)
            except ValueError as error:
                raise EngineRefused(str(error)) from error

    # -- the thread ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _work(self) -> None:
        try:
            while not self._closing:
                self._run_commands()
                if self._worker.has_work and not self._closing:
                    self._worker.step()
        except BaseException as error:
            died = EngineDied(f"the engine of {self.model_name} crashed: {error!r}")
            died.__cause__ = error
            self._die(died)
        else:
            self._die(EngineDied(f"the engine of {self.model_name} was closed"))

    def _run_commands(self) -> None:
        """Run all commands that have come. Waits for one if there is no other work."""
        while not self._closing:
            try:
                command = self._commands.get(block=not self._worker.has_work)
            except queue.Empty:
                return
            command.run()

    def _close(self) -> None:
        self._closing = True
        self._worker.close()

    def _die(self, death: EngineDied) -> None:
        with self._death_lock:
            self._death = death
        self._worker.fail_all(death)
        while not self._commands.empty():
            self._commands.get().fail(copy_death(death))
