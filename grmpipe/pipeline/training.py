"""From judged groups to versions of the policy: takes groups as they are due, steps, pushes. Holds no group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from grmpipe.data.stream import EndOfData
from grmpipe.pipeline.group_buffer import GroupBuffer
from grmpipe.pipeline.interfaces import FlowConfig, PipelineComponents, StepReport
from grmpipe.pipeline.stall_times import StallTracker
from grmpipe.pipeline.why_waiting import pending
from grmpipe.types import JudgedGroup
from scheduler.clock import ActiveClock
from scheduler.stage import BusyMeter
from scheduler.weights.weight_sync import SyncReport

log = logging.getLogger(__name__)

T = TypeVar("T")
SHOWN_FROM_S = 1e-3  # shorter work of the learner on a group gets no span in the timeline


class Interrupted(Exception):
    """The run was asked to stop, and did so between two optimizer steps."""


class Consumer:
    """The learner's loop. A step is a batch of groups, an update and a push; its end makes room for new groups. It
    holds no group: the open batch is in the buffer.
    """

    def __init__(
        self,
        parts: PipelineComponents,
        config: FlowConfig,
        buffer: GroupBuffer,
        stalls: StallTracker,
        clock: ActiveClock,
        playing: BusyMeter,
        after_step: Callable[[StepReport], Awaitable[None]],
    ) -> None:
        """`clock` stands still while weights are pushed; `playing` runs while any rollout is in flight."""
        self.after_step = after_step
        self._parts = parts
        self._config = config
        self._buffer = buffer
        self._waits = stalls
        self._clock = clock
        self._playing = playing
        self._interrupted = False

    @property
    def version(self) -> int:
        return self._buffer.version

    def interrupt(self) -> None:
        self._interrupted = True
        self._buffer.notify()

    async def run(self) -> None:
        """Run all steps. Raises Interrupted, or EndOfData if the remaining groups fill no batch."""
        while self.version < self._config.num_steps:
            await self.after_step(await self._step())

    async def _step(self) -> StepReport:
        now, stalls = asyncio.get_running_loop().time, self._waits
        began, played_s = now(), self._playing.busy_s
        await self._fill()
        filled = now()
        with stalls.learning(self._makes_room):
            metrics = await self._parts.trainer.step(self._buffer.batch)
        learned = now()
        if self._config.deterministic:
            await self._settle()
        settled = now()
        with stalls.pushing():
            sync = await self._push()
        groups = self._buffer.stepped()
        ended = now()
        self._parts.events.span("learner", f"step {self.version}", filled, learned)
        self._parts.events.span("weight sync", f"version {self.version}", settled, ended, bytes=sync.num_bytes)
        step_stalls = stalls.close_step(ended - began)
        return StepReport(
            step=self.version,
            groups=groups,
            learner=metrics,
            sync=sync,
            stalls=step_stalls,
            learner_busy_s=settled - began - step_stalls.for_groups_s,
            policy_idle_s=max(0.0, ended - began - (self._playing.busy_s - played_s)),
        )

    async def _fill(self) -> None:
        """Fill the batch. The learner works on a group once it is taken, on held-back ones while none is ready."""
        while (places := self._buffer.places_left) > 0:
            if (group := self._ready_group()) is None:
                await self._go_on()
                with self._waits.wanting(places, self.version):
                    group = await self._until(self._ready_group)
            await self._learn(self._parts.trainer.take(group))

    def _ready_group(self) -> JudgedGroup | None:
        if self._interrupted:
            raise Interrupted
        group = self._buffer.take()
        if group is None and self._buffer.is_over:
            raise EndOfData("no prompts left, and no group in flight")
        return group

    async def _settle(self) -> None:
        """Wait until every group that may be opened under these weights is opened and judged. Then no group has tokens
        of two versions, and the version that opens a group does not depend on time."""
        with self._waits.wanting(self._buffer.num_untaken, self.version):
            await self._until(lambda: self._buffer.is_settled)

    async def _until(self, found: Callable[[], T | None]) -> T:
        """Wait until `found` finds something, at each news of a group, and return it. Logs every `report_wait_s` what
        it waits for.
        """
        now = asyncio.get_running_loop().time
        report_at = now() + self._config.report_wait_s
        while not (sought := found()):
            if not await self._buffer.news(within_s=report_at - now()):
                log.warning("the learner waits for groups; pending: %s", pending(self._buffer))
                report_at += self._config.report_wait_s
        return sought

    async def _go_on(self) -> None:
        """Let the learner train on the groups it has, while no group is ready. Not in a deterministic run: when that is
        depends on time."""
        if self._config.deterministic or not self._buffer.num_taken:
            return
        if await self._learn(self._parts.trainer.while_waiting()):
            self._buffer.last_taken.early = True

    async def _learn(self, work: Awaitable[T]) -> T:
        now = asyncio.get_running_loop().time
        began = now()
        with self._waits.learning(self._makes_room):
            done = await work
        if (ended := now()) - began > SHOWN_FROM_S:
            last = self._buffer.last_taken.group_id
            self._parts.events.span("learner", "accumulate", began, ended, last_group=last)
        return done

    async def _push(self) -> SyncReport:
        with self._clock.paused():
            return await self._parts.push_weights(self.version + 1)

    @property
    def _makes_room(self) -> bool:
        """Whether the end of the open batch will admit new groups: not in the last steps."""
        last = self.version + self._config.max_staleness + 1 >= self._config.num_steps
        return not last and not self._buffer.prompts_over

    async def give_up(self) -> None:
        """Drop the incomplete batch: the prompts are over and the remaining groups fill no batch."""
        await self._parts.trainer.discard()
        log.warning("no more prompts: %d groups of an incomplete batch are dropped", len(self._buffer.groups))
        self._buffer.give_up()
