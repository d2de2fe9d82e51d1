"""The shell of every task that starts processes: opens its files, ends it in order on signals, and writes any end to
summary.json.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.observe.changes import read_changes
from grmpipe.observe.summary import Status, Summary, with_requests, write_summary
from grmpipe.run.loop_watchdog import watch_loop
from grmpipe.run.observers import Observers
from grmpipe.run.run_watcher import RunWatcher
from grmpipe.run.signals import HAS_ENDED, StopRequest, end_by_signals, stop_by_signals
from grmpipe.run_dir.checkpoints import Checkpoints, load_state
from grmpipe.run_dir.identity import read_run_id
from grmpipe.run_dir.recovery import BEGINNING
from grmpipe.run_dir.run_state import RunState
from grmpipe.scheduler.processes.actors import ActorDied
from grmpipe.scheduler.run_together import describe_failure
from grmpipe.scheduler.slots.replacement_tries import ReplacementTries
from grmpipe.trackers.tracker import SampleRow

log = logging.getLogger(__name__)

SUMMARY = "summary.json"


class HasConfig(Protocol):
    """The preparation of a task, before anything started."""

    @property
    def config(self) -> RunConfig: ...


P = TypeVar("P", bound=HasConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a run has before its task begins: its directory, its observers, and where a resume continues.

    resumed: the checkpoint that a resume, or a restart, continues from; None without one. state: the one there, or the
    beginning. watcher: who acts between steps. is_restart: whether this process began the run before.
    """

    run_dir: Path
    observers: Observers
    checkpoints: Checkpoints
    resumed: Path | None = None
    state: RunState = BEGINNING
    watcher: RunWatcher = field(default_factory=RunWatcher)
    is_restart: bool = False
    began_s: float = field(default_factory=time.monotonic)

    @property
    def since_start_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def wall_s(self) -> float:
        """Seconds of all processes of the run."""
        return round(self.state.wall_s + self.since_start_s, 3)

    @staticmethod
    def open(
        config: RunConfig, checkpoints: Checkpoints, resumed: Path | None, state: RunState, *, gauges: bool
    ) -> RunContext:
        """With observers that are open. gauges: as of Observers.open."""
        run_dir = checkpoints.directory.parent
        observers = Observers.open(config, run_dir, state if resumed else None, gauges=gauges)
        return RunContext(run_dir=run_dir, observers=observers, checkpoints=checkpoints, resumed=resumed, state=state)


class Run(ABC, Generic[P]):
    """The work of one task in a run."""

    is_policy_run: ClassVar[bool] = True  # the console shows the metrics of a policy's steps

    def __init__(self, prepared: P, context: RunContext) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._context = context
        self._run_dir = context.run_dir
        self._observers = context.observers

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def context(self) -> RunContext:
        return self._context

    @property
    def rows(self) -> Sequence[SampleRow]:
        """Rollouts to show at the end."""
        return ()

    @abstractmethod
    async def run(self) -> Status:
        """Run to the end, or to where a signal stopped it. An error ends the run as failed, except a ConfigError, which
        a task raises before it changes anything.
        """

    @abstractmethod
    def results(self) -> Summary:
        """The results so far. `run_in_directory` adds how the run ended, its time, the objective, changes and
        failures of journals.
        """

    @property
    def restartable_step(self) -> int | None:
        """The step that the run is at, if it can begin again at its last checkpoint; else None."""
        return None

    async def after_failure(self, error: Exception) -> str:
        """Save what can be saved. Returns a text for the failure in the summary."""
        return ""

    async def close(self) -> None:
        """End the processes; called at any end."""


async def run_in_directory(
    make_run: type[Run[P]],
    prepared: P,
    run_dir: Path,
    resumed: Path | None = None,
    watcher: RunWatcher | None = None,
) -> Summary:
    """Run a task to an end of any kind, write its summary, show where its files are. A run whose learner or critic died
    begins again at its newest checkpoint.

    resumed: the checkpoint to continue from. Raises ConfigError; other errors of the task are in the summary.
    """
    config = prepared.config
    with end_by_signals() as request, watch_loop():
        checkpoints = Checkpoints(directory=run_dir / "checkpoints", keep=config.train.keep_checkpoints)
        restarts = Restarts(checkpoints, config.slots.health.max_replacements)
        state = load_state(resumed) if resumed else BEGINNING
        (run_dir / SUMMARY).unlink(missing_ok=True)  # untrue once a resume has begun
        unwritten, alarms = Counter[str](), list[str]()  # lines, by journal
        while True:
            context = RunContext.open(config, checkpoints, resumed, state, gauges=make_run.is_policy_run)
            context = replace(context, watcher=watcher or RunWatcher(), is_restart=restarts.were_made)
            log.info("run %s, in %s", read_run_id(run_dir), run_dir)
            try:
                run = make_run(prepared, context)
                summary = await run_to_end(run, restarts, request)
                context.observers.trackers.end(summary.status, summary.failure)
            except Restart as restart:
                context.observers.note(f"{restart}; the run begins again at its last checkpoint")
                resumed, state = restart.checkpoint, begin_again(restart, make_summary(run, "failed", restart.cause))
                continue
            finally:
                context.observers.close()
                unwritten.update(context.observers.journal_failures)
                alarms += context.observers.describe_lost_lines()
            summary = replace(summary, alarms=(*summary.alarms, *alarms), journal_failures=dict(unwritten))
            return write_end(summary, run)


def write_end(summary: Summary, run: Run[P]) -> Summary:
    """Write summary.json and the report; show where the files are. Returns what was written."""
    run_dir, observers = run.context.run_dir, run.context.observers
    judging = with_requests(summary.judging, observers.requests.totals, observers.budget.spending.summary)
    summary = replace(summary, judging=judging, changes=read_changes(run_dir), run_id=read_run_id(run_dir))
    summary = write_summary(with_objective(summary, run.config.objective), run_dir / SUMMARY)
    if summary.status == "completed":
        observers.budget.end_complete()
    observers.show_end(run_dir, run.rows, summary.bottleneck)
    return summary


def begin_again(restart: Restart, ended: Summary) -> RunState:
    """The state at a restart. Its checkpoint lacks the time of the attempt that ended."""
    state = load_state(restart.checkpoint) if restart.checkpoint is not None else BEGINNING
    return replace(state, wall_s=ended.wall_s, busy_s=ended.busy_s, restarts=(*ended.restarts, restart.cause))


async def run_to_end(run: Run[P], restarts: Restarts, request: StopRequest) -> Summary:
    """The summary of the run's end, whatever it is. Raises only ConfigError, and Restart."""
    context = run.context
    context.observers.show_changes(read_changes(context.run_dir))
    try:
        async with context.observers.progress.show():
            return make_summary(run, await run.run())
    except asyncio.CancelledError:
        return make_summary(run, "interrupted")
    except Exception as error:
        if isinstance(error, ConfigError) and not restarts.were_made:
            if context.resumed is None:  # the directory is free for the same command with the key set right
                (context.run_dir / "config.yaml").unlink(missing_ok=True)
            raise
        log.exception("the run failed", extra={"file_only": True})
        saved = await run.after_failure(error)
        if request.came:  # what sent us a signal may have sent it to the processes of engines and learners too
            return make_summary(run, "interrupted", describe_failure(error) + saved)
        if (restart := restarts.plan(error, run.restartable_step)) is not None:
            raise restart from error
        return make_summary(run, "failed", describe_failure(error) + saved)
    finally:
        with stop_by_signals(lambda: None, HAS_ENDED):
            await run.close()


def make_summary(run: Run[P], status: Status, failure: str | None = None) -> Summary:
    return replace(
        run.results(), status=status, wall_s=run.context.wall_s, restarts=run.context.state.restarts, failure=failure
    )


def with_objective(summary: Summary, path: str) -> Summary:
    """The summary with the number that a sweeper needs; null if the run has none."""
    try:
        return summary.with_objective(path)
    except ValueError as error:
        log.info("%s", error)
        return summary


# -- a run that begins again at its newest checkpoint, after a process that trains has died ----------------------------


RUN = "run"  # what is tried again, as a whole


class Restart(Exception):
    """The run begins again. checkpoint: where it continues; None: at its beginning. cause: in one line."""

    def __init__(self, checkpoint: Path | None, cause: str) -> None:
        super().__init__(cause)
        self.checkpoint = checkpoint
        self.cause = cause


class Restarts:
    """Decides whether a failed run begins again: at most `most` times within an hour, and not where the same process
    has died at the same step before.
    """

    def __init__(self, checkpoints: Checkpoints, most: int) -> None:
        self._checkpoints = checkpoints
        self._tries = ReplacementTries(most)
        self._deaths: set[tuple[int, str]] = set()  # (step, process)
        self.were_made = False

    def plan(self, error: Exception, step: int | None) -> Restart | None:
        """The restart after this error; None if the run ends with it.

        step: at which the run was; None where it can't begin again.
        """
        died = next((one for one in walk_causes(error) if isinstance(one, ActorDied)), None)
        if died is None or step is None:
            return None
        if (death := (step, died.name)) in self._deaths:
            log.warning("no restart: %s died twice at step %d", died.name, step)
            return None
        self._deaths.add(death)
        found = self._checkpoints.find()
        if found.checkpoint is None and found.damaged:
            log.warning("no restart: no checkpoint is complete (%s)", "; ".join(found.damaged))
            return None
        if not self._tries.may_try(RUN):
            log.warning("no restart: slots.health.max_replacements are used up")
            return None
        self.were_made = True
        cause = str(died).splitlines()[0].partition(" Last lines:")[0]  # run.log has those of its process
        return Restart(found.checkpoint, f"step {step}: {cause}")


def walk_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, and what a group of errors holds."""
    yield error
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from walk_causes(one)
    if error.__cause__ is not None:
        yield from walk_causes(error.__cause__)
