"""Runs from Python: one that blocks, one whose steps are awaited, and a judge that is asked, each of these two in a
thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from grmpipe.cli import run_task
from grmpipe.config.keys.secrets import mask_errors
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.observe.logs import kept_logging
from grmpipe.observe.recorder import JudgedSibling
from grmpipe.run.errors import RunFailed, RunInterrupted
from grmpipe.run.run_watcher import AskJudge, RunWatcher, StepControls
from grmpipe.run.signals import StopRequest, stoppable
from grmpipe.types import Metrics

if TYPE_CHECKING:
    from grmpipe.run_reader import RunReader

T = TypeVar("T")
LOOP_CHECK_S = 1.0  # between looks at whether the event loop of a run's user is closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step. step: from 1. metrics: its line of metrics.jsonl (docs/metrics.md), each in its unit."""

    step: int
    metrics: Mapping[str, float]


class _Opened(RunWatcher):
    run_dir: Path | None = None

    def note_opened(self, run_dir: Path) -> None:
        self.run_dir = run_dir


def launch(config: RunConfig) -> RunReader | None:
    """Run the task to its end, as the command does. Returns the run's files; None for a task that only shows.

    A script, a thread or a notebook may call it. Signals are taken in the main thread only. Raises ConfigError,
    RunFailed or RunInterrupted.
    """
    watcher = _Opened()
    with mask_errors(), kept_process():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            run_task(config, watcher)
        else:  # a notebook's, for example: in a thread beside it
            _in_thread(config, watcher)
    return None if watcher.run_dir is None else _read_run(watcher.run_dir)


@contextmanager
def kept_process() -> Iterator[None]:
    """Context of a run in its user's own process, which gets back its logging, and torch's threads if it has torch."""
    torch = sys.modules.get("torch")
    num_threads = torch.get_num_threads() if torch is not None else 0
    with kept_logging():
        try:
            yield
        finally:
            if torch is not None and torch.get_num_threads() != num_threads:  # setting it starts them
                torch.set_num_threads(num_threads)


def _in_thread(config: RunConfig, watcher: RunWatcher) -> None:
    request = StopRequest()
    ended = _started(config, watcher, request)
    try:
        ended.result()
    except BaseException as error:  # the run's own, or what a signal's handler raises here
        if ended.done():
            raise
        print(f"grmpipe: {request.ask()}", file=sys.stderr)
        ended.exception()
        if isinstance(error, KeyboardInterrupt):
            ended.result()
        raise


def _started(config: RunConfig, watcher: RunWatcher, request: StopRequest) -> Future[float | None]:
    """A run in a thread of its own: its objective or its error."""
    ended: Future[float | None] = Future()
    ended.set_running_or_notify_cancel()  # from now on a cancelled wait for it leaves it alone

    def work() -> None:
        try:
            with mask_errors(), kept_process(), stoppable(request):
                objective = run_task(config, watcher)
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(objective)

    threading.Thread(target=work, name="grmpipe-run", daemon=True).start()
    return ended


@asynccontextmanager
async def start(config: RunConfig) -> AsyncIterator[StartedRun]:
    """Context: a training run that is started, in whose `steps` one may evaluate, checkpoint and stop. The block's end
    stops the run in order, with a checkpoint, unless it is complete. Raises ConfigError and RunFailed.
    """
    if config.task != "train" or config.data.retrain_from is not None:
        raise ConfigError("task: only a policy's training has steps to await; call grmpipe.launch(config)")
    run = StartedRun(config)
    try:
        await run._until_open()
        yield run
    finally:  # also if this is cancelled while the run starts
        await run.stop()
    await run._ended()


class StartedRun(RunWatcher):
    """A run that waits after each step, until the next one is asked for."""

    run_dir: Path

    def __init__(self, config: RunConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._open, self._over, self._steps = asyncio.Event(), asyncio.Event(), asyncio.Queue[Step | None]()
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event, StepControls] | None = None
        self._waits, self._stopped = True, False
        self._in_hand = False  # the user has a step, in which the run waits
        self._request = StopRequest()
        self._future = _started(config, self, self._request)
        self._future.add_done_callback(lambda _: self._tell(self._note_end))

    @property
    def files(self) -> RunReader:
        """The run's files so far."""
        return _read_run(self.run_dir)

    async def steps(self) -> AsyncIterator[Step]:
        """Each step once it is over. The run waits in the loop's body. Raises RunFailed."""
        if self._in_hand:
            self._go_on()
        while (step := await self._steps.get()) is not None:
            self._in_hand = True
            yield step
            self._go_on()
        self._steps.put_nowait(None)  # for a loop after this one
        await self._ended()

    async def evaluate(self) -> Metrics:
        """Evaluate the policy on all held-out problems now; between two steps. Returns metrics by name, as those of
        `eval` in summary.json.
        """
        return await self._between_steps(lambda controls: controls.evaluate())

    async def checkpoint(self) -> Path:
        """Write a checkpoint now; between two steps. Returns its directory."""
        return await self._between_steps(lambda controls: asyncio.shield(controls.checkpoint()))

    async def finish(self) -> RunReader:
        """Let the run go on to its end without waiting. Raises RunFailed."""
        self._waits = False
        self._go_on()
        await self._ended()
        return self.files

    async def stop(self) -> None:
        """End the run with a checkpoint, to be continued with resume=auto. Returns once it has ended."""
        self._stopped = True
        self._request.ask()
        self._waits = False  # from now on: it must not begin another step before it is asked
        self._go_on()
        await self._over.wait()

    # -- called in the run's thread ---------------------------------------------------------------------------------

    def note_opened(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._tell(self._open.set)

    async def after_step(self, step: int, metrics: Metrics, controls: StepControls) -> None:
        going_on = asyncio.Event()
        self._waiting = (asyncio.get_running_loop(), going_on, controls)
        waits = self._waits  # read after `_waiting` is set, and before the user can act on the step
        self._tell(self._steps.put_nowait, Step(step=step, metrics=metrics))
        while waits and not going_on.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(going_on.wait(), LOOP_CHECK_S)
            if self._loop.is_closed():  # nobody can ask for the next step
                self._request.ask()
                break
        await asyncio.sleep(0)  # a request to stop comes first

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the user's event loop is closed
            self._loop.call_soon_threadsafe(call, *args)

    # -- called in the user's ----------------------------------------------------------------------------------------

    def _note_end(self) -> None:
        self._open.set()
        self._over.set()
        self._steps.put_nowait(None)

    def _go_on(self) -> None:
        self._in_hand = False
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            loop, going_on, _ = waiting
            with suppress(RuntimeError):  # the run has ended
                loop.call_soon_threadsafe(going_on.set)

    async def _between_steps(self, ask: Callable[[StepControls], Awaitable[T]]) -> T:
        if self._waiting is None or self._future.done():
            raise RuntimeError("the run waits for nobody: call this in the body of `async for step in run.steps()`")
        loop, _, controls = self._waiting

        async def asked() -> T:
            with mask_errors():
                return await ask(controls)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked(), loop))

    async def _until_open(self) -> None:
        await self._open.wait()
        if self._future.done():
            self._future.result()

    async def _ended(self) -> None:
        """Raises the run's error, unless it was asked to stop."""
        try:
            await asyncio.wrap_future(self._future)
        except (RunInterrupted, KeyboardInterrupt):
            if not self._stopped:
                raise


# -- a judge -----------------------------------------------------------------------------------------------------------


class StartedJudge(RunWatcher):
    """A judge that runs alone: its engines, votes, limits and journals are those of a run.

    async with grmpipe.start_judge(config) as judge:
        verdicts = await judge("What is 6 x 7?", ["42", "It is 41."], reference="42")

    with grmpipe.start_judge(config) as judge:  # in a script, or a thread
        verdicts = judge.ask("What is 6 x 7?", ["42", "It is 41."], reference="42")

    Any thread or event loop may ask, as often and as many at once as it likes. Leaving the block ends the judge.
    """

    asks = True
    run_dir: Path

    def __init__(self, config: RunConfig) -> None:
        self._config = replace(config, task="score")
        self._request = StopRequest()
        self._serving: Future[tuple[asyncio.AbstractEventLoop, AskJudge]] = Future()
        self._leave: asyncio.Event | None = None
        self._ended: Future[float | None] | None = None

    async def __call__(
        self, prompt: str | Sequence[Mapping[str, str]], responses: Sequence[object], **columns: object
    ) -> list[JudgedSibling]:
        """The verdicts on responses to one prompt, in their order: `reward` from 0 to 1 and `score` on the judge's
        scale, or None and `failed`, the cause.

        prompt:    a text, or messages ({role, content}), of which the last is the user's.
        responses: texts, or lists of messages for episodes of several turns. Judges that compare see them together.
        columns:   reference, rubric, source, info, prompt_id, and what a reward function takes. Under the same
                   prompt_id the same question gets the same judgement, where the engine repeats its draws.

        Raises ValueError for what can't be judged, or doesn't fit into the budget; RunFailed once the judge has ended.
        """
        return await asyncio.wrap_future(self._ask(prompt, responses, columns))

    def ask(
        self, prompt: str | Sequence[Mapping[str, str]], responses: Sequence[object], **columns: object
    ) -> list[JudgedSibling]:
        """The same, and blocks: not in an event loop."""
        return self._ask(prompt, responses, columns).result()

    @property
    def files(self) -> RunReader:
        """The judge's files so far: its judgements, its requests."""
        return _read_run(self.run_dir)

    def __enter__(self) -> StartedJudge:
        self._begin()
        self._serving.result()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._wait_for_end()

    async def __aenter__(self) -> StartedJudge:
        self._begin()
        try:
            await asyncio.to_thread(self._serving.result)
        except asyncio.CancelledError:
            self._end()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._end()
        await asyncio.shield(asyncio.to_thread(self._wait_for_end))

    # -- in the judge's thread -----------------------------------------------------------------------------------------

    def note_opened(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    async def serve(self, judge: AskJudge) -> None:
        self._leave = asyncio.Event()
        self._serving.set_result((asyncio.get_running_loop(), judge))
        await self._leave.wait()

    # -- in its user's -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._ended is not None:
            raise RuntimeError("this judge has been started; call grmpipe.start_judge again for another one")
        self._ended = _started(self._config, self, self._request)
        self._ended.add_done_callback(self._note_end)

    def _note_end(self, ended: Future[float | None]) -> None:
        if not self._serving.done():  # it ended before it served
            self._serving.set_exception(ended.exception() or RunInterrupted("the judge was stopped while it started"))

    def _ask(
        self, prompt: object, responses: Sequence[object], columns: Mapping[str, object]
    ) -> Future[list[JudgedSibling]]:
        loop, judge = self._serving.result(timeout=0)
        assert self._ended is not None
        if self._ended.done():
            self._ended.result()
            raise RunFailed("the judge has ended; ask within its block")
        row = {**columns, "prompt": prompt, "responses": responses}

        async def asked() -> list[JudgedSibling]:
            with mask_errors():
                return [*await judge(row)]

        return asyncio.run_coroutine_threadsafe(asked(), loop)

    def _end(self) -> None:
        if not self._serving.done() or self._serving.exception() is not None:
            self._request.ask()
            return
        loop, _ = self._serving.result()
        assert self._leave is not None
        with suppress(RuntimeError):  # it has ended by itself
            loop.call_soon_threadsafe(self._leave.set)

    def _wait_for_end(self) -> None:
        assert self._ended is not None
        with suppress(RunInterrupted, KeyboardInterrupt):
            self._ended.result()


def start_judge(config: RunConfig) -> StartedJudge:
    """The judge of a configuration, to be started by `with` or `async with`. Raises ConfigError and RunFailed there."""
    return StartedJudge(config)


def _read_run(run_dir: Path) -> RunReader:
    from grmpipe.run_reader import read_run  # late: a judge answers before anybody reads its files

    return read_run(run_dir)
