"""From judged groups to versions of the policy: takes groups as they are due, steps, pushes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from grmpipe.data.stream import EndOfData
from grmpipe.pipeline.group import OPEN
from grmpipe.pipeline.group_buffer import GroupBuffer
from grmpipe.pipeline.interfaces import FlowConfig, PipelineComponents, StepReport, TrainedBatch
from grmpipe.pipeline.stall_times import StallTracker
from grmpipe.pipeline.why_waiting import describe_pending
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.weights.weight_push import SyncReport
from grmpipe.scheduler.work_queue import BusyMeter
from grmpipe.types import JudgedGroup

log = logging.getLogger(__name__)

T = TypeVar("T")
SHOWN_FROM_S = 1e-3  # shorter work of the learner on a group gets no span in the timeline


NOT_FINITE = "not_finite"  # why groups are dropped whose batch has numbers that aren't finite
OnSkipped = Callable[[Sequence[JudgedGroup]], object]


def ignore_skipped(batch: Sequence[JudgedGroup]) -> None:
    """The default for `on_skipped`."""


class Interrupted(Exception):
    """The run was asked to stop, and did so between two optimizer steps."""


class TimedLearner:
    """The learner. Each call is a span in the timeline and counts in the stall times. The clock of group deadlines
    stands still while weights are pushed.
    """

    def __init__(
        self,
        components: PipelineComponents,
        buffer: GroupBuffer,
        stalls: StallTracker,
        clock: ActiveClock,
    ) -> None:
        self._components = components
        self._buffer = buffer
        self._stalls = stalls
        self._clock = clock
        self._now = asyncio.get_running_loop().time

    async def learn(self, work: Awaitable[T]) -> T:
        """Let it work on the groups that it has."""
        began = self._now()
        with self._stalls.track_learner(self._buffer.makes_room):
            done = await work
        if (ended := self._now()) - began > SHOWN_FROM_S:
            last = self._buffer.taken[-1].group_id
            self._components.events.span("learner", "accumulate", began, ended, last_group=last)
        return done

    async def step(self) -> TrainedBatch:
        began = self._now()
        with self._stalls.track_learner(self._buffer.makes_room):
            trained = await self._components.trainer.step(self._buffer.batch)
        self._components.events.span("learner", f"step {self._buffer.version + 1}", began, self._now())
        return trained

    async def push(self) -> SyncReport:
        began, version = self._now(), self._buffer.version + 1
        with self._stalls.track_push(), self._clock.pause():
            sync = await self._components.push_weights(version)
        self._components.events.span("weight sync", f"version {version}", began, self._now(), bytes=sync.num_bytes)
        return sync


class Consumer:
    """The learner's loop. A step is a batch of groups, an update and a push; its end makes room for new groups. It
    holds no group: the open batch is in the buffer.
    """

    def __init__(
        self,
        components: PipelineComponents,
        config: FlowConfig,
        buffer: GroupBuffer,
        stalls: StallTracker,
        clock: ActiveClock,
        playing: BusyMeter,
        after_step: Callable[[StepReport], Awaitable[None]],
        on_skipped: OnSkipped = ignore_skipped,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """clock: of group deadlines. playing: runs while any rollout is in flight. on_skipped: called with a batch that
        is dropped because its numbers aren't finite. is_paused: whether judging has paused for the rest of the process,
        which is an interrupt.
        """
        self.after_step = after_step
        self._on_skipped = on_skipped
        self._is_paused = is_paused
        self._trainer = components.trainer
        self._learner = TimedLearner(components, buffer, stalls, clock)
        self._config = config
        self._buffer = buffer
        self._stalls = stalls
        self._now = asyncio.get_running_loop().time
        self._clock = clock
        self._playing = playing
        self._interrupted = False

    @property
    def version(self) -> int:
        return self._buffer.version

    def interrupt(self) -> None:
        self._interrupted = True
        self._buffer.news.set()

    async def run(self) -> None:
        """Run all steps. Raises Interrupted, or EndOfData if the remaining groups fill no batch."""
        while self.version < self._config.num_steps:
            await self.after_step(await self._step())

    async def _step(self) -> StepReport:
        began, played_s = self._now(), self._playing.busy_s
        trained = await self._train_batch()
        await self._settle()
        sync = await self._learner.push()
        # Read before `end_step`, which empties the open batch.
        times = {(group.group_id, n): of_one for group in self._buffer.taken for n, of_one in group.times.items()}
        step_s = self._now() - began
        if not self._config.deterministic:  # there the learner waits for every group that may be opened
            self._buffer.pace.step_ended(self._now(), step_s)
        groups = self._buffer.end_step()
        stalls = self._stalls.close_step(step_s)
        idle_s = max(0.0, stalls.steps_s - (self._playing.busy_s - played_s))
        return StepReport(
            step=self.version,
            groups=groups,
            learner=trained.metrics,
            sync=sync,
            stalls=stalls,
            policy_idle_s=idle_s,
            advantages=trained.advantages,
            times=times,
        )

    async def _train_batch(self) -> TrainedBatch:
        """Train on a batch. One whose numbers aren't finite is dropped, and another one taken: the learner has
        discarded it, so weights, version and schedule are as before.
        """
        while True:
            await self._fill()
            try:
                return await self._learner.step()
            except ArithmeticError as error:
                num_skipped = self._buffer.ledger.num_dropped(NOT_FINITE) // self._config.groups_per_batch
                if num_skipped >= self._config.max_skipped_steps:
                    raise
                log.warning(
                    "batch %d of at most %d is dropped: %s", num_skipped + 1, self._config.max_skipped_steps, error
                )
                self._on_skipped(self._buffer.batch)
                self._buffer.drop_batch(NOT_FINITE, str(error))

    async def _fill(self) -> None:
        """Fill the batch. The learner works on a group once it is taken, on held-back ones while none is ready."""
        while (places := self._buffer.places_left) > 0:
            if (group := self._ready_group()) is None:
                await self._go_on()
                with self._stalls.track_wait(places):
                    group = await self._until(self._ready_group)
            await self._learner.learn(self._trainer.take(group))

    def _ready_group(self) -> JudgedGroup | None:
        if self._interrupted or self._is_paused():
            raise Interrupted
        group = self._buffer.take()
        if group is None and self._buffer.is_over:
            raise EndOfData("no prompts left, and no group in flight")
        return group

    async def _settle(self) -> None:
        """In a deterministic run, wait until every group that may be opened under these weights is opened and judged.
        Then no group has tokens of two versions, and the version that opens a group does not depend on time.
        """
        if self._config.deterministic:
            with self._stalls.track_wait(len(self._buffer.untaken)):
                await self._until(lambda: self._buffer.is_done_with(*OPEN) or self._is_paused())

    async def _until(self, found: Callable[[], T | None]) -> T:
        """Wait until `found` finds something, at each news of a group, and return it. Logs every `report_wait_s` what
        it waits for.
        """
        report_at = self._now() + self._config.report_wait_s
        while not (sought := found()):
            self._buffer.news.clear()  # nothing is awaited since the look above, so no news is lost
            try:
                async with asyncio.timeout(report_at - self._now()):
                    await self._buffer.news.wait()
            except TimeoutError:
                log.warning(
                    "the learner waits for groups; pending: %s", describe_pending(self._buffer, self._clock.now())
                )
                report_at += self._config.report_wait_s
        return sought

    async def _go_on(self) -> None:
        """Let the learner train on the groups it has, while no group is ready. Not in a deterministic run: when that is
        depends on time."""
        if self._config.deterministic or not self._buffer.taken:
            return
        if await self._learner.learn(self._trainer.while_waiting()):
            self._buffer.taken[-1].early = True

    async def give_up(self) -> None:
        """Drop the incomplete batch: the prompts are over and the remaining groups fill no batch."""
        await self._trainer.discard()
        log.warning("no more prompts: %d groups of an incomplete batch are dropped", len(self._buffer.groups))
        self._buffer.give_up()
