"""From judged groups to versions of the policy: takes them as they are due, steps, pushes. Opens and judges none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from grmpipe.data.stream import EndOfData
from grmpipe.pipeline.group_buffer import Flight, describe
from grmpipe.pipeline.interfaces import Cut, FlowConfig, Parts, StepReport
from grmpipe.types import JudgedGroup
from scheduler.clock import ActiveClock
from scheduler.stream import BusyMeter
from scheduler.weights.weight_sync import SyncReport

log = logging.getLogger(__name__)

T = TypeVar("T")
SHOWN_FROM_S = 1e-3  # a group that only waits to be packed costs the learner no time worth a span


class Interrupted(Exception):
    """Somebody asked the run to stop between two optimizer steps."""


class Consumer:
    """The learner's loop: a step is a batch of groups, an update, a push, and room for the next groups."""

    def __init__(
        self,
        parts: Parts,
        config: FlowConfig,
        flight: Flight,
        clock: ActiveClock,
        playing: BusyMeter,
        after_step: Callable[[StepReport], Awaitable[None]],
        cut: Cut,
    ) -> None:
        """`clock` stands still while weights are pushed; `playing` runs while any rollout is in flight."""
        self.batch: list[JudgedGroup] = []  # taken and not stepped
        self.max_staleness_trained = cut.max_staleness_trained
        self.after_step = after_step
        self._parts = parts
        self._config = config
        self._flight = flight
        self._clock = clock
        self._playing = playing
        self._early: set[str] = set()  # of the batch: the learner went on with what it had before the next one came
        self._interrupted = False

    @property
    def version(self) -> int:
        return self._flight.admission.version

    def interrupt(self) -> None:
        self._interrupted = True
        self._flight.tell()

    async def run(self) -> None:
        """Returns when all steps are done. Raises Interrupted, or EndOfData where the rest fills no batch."""
        while self.version < self._config.num_steps:
            await self.after_step(await self._step())

    async def _step(self) -> StepReport:
        now, waits = asyncio.get_running_loop().time, self._flight.waits
        began, played_s = now(), self._playing.busy_s
        await self._fill()
        filled = now()
        with waits.learning(self._makes_room):
            metrics = await self._parts.trainer.step()
        learned = now()
        with waits.pushing():
            sync = await self._push()
        groups = self._release()
        ended = now()
        self._parts.events.span("learner", f"step {self.version}", filled, learned)
        self._parts.events.span("weight sync", f"version {self.version}", learned, ended, bytes=sync.num_bytes)
        step_waits = waits.close_step(ended - began)
        return StepReport(
            step=self.version,
            groups=groups,
            learner=metrics,
            sync=sync,
            waits=step_waits,
            learner_busy_s=learned - began - step_waits.for_groups_s,
            policy_idle_s=max(0.0, ended - began - (self._playing.busy_s - played_s)),
        )

    async def _fill(self) -> None:
        """The learner works on a group as soon as the batch has it, and on what it holds back while none is ready."""
        while (places := self._config.groups_per_batch - len(self.batch)) > 0:
            if (group := self._ready_group()) is None:
                await self._go_on()
                with self._flight.waits.wanting(places, self.version):
                    group = await self._next_group()
            self.batch.append(group)
            await self._learn(self._parts.trainer.take(group))

    def _ready_group(self) -> JudgedGroup | None:
        if self._interrupted:
            raise Interrupted
        return self._flight.take()

    async def _next_group(self) -> JudgedGroup:
        while True:
            if (group := self._ready_group()) is not None:
                return group
            if self._flight.is_over:
                raise EndOfData("no prompts left, and no group in flight")
            if not await self._flight.news(within_s=self._config.report_wait_s):
                self._report_wait()

    async def _go_on(self) -> None:
        """No group is ready: the learner does what it can with those that it has."""
        if not self.batch:
            return
        if await self._learn(self._parts.trainer.while_waiting()):
            self._early.add(self.batch[-1].group_id)

    async def _learn(self, work: Awaitable[T]) -> T:
        now = asyncio.get_running_loop().time
        began = now()
        with self._flight.waits.learning(self._makes_room):
            done = await work
        if (ended := now()) - began > SHOWN_FROM_S:
            last = self.batch[-1].group_id
            self._parts.events.span("learner", "accumulate", began, ended, last_group=last)
        return done

    async def _push(self) -> SyncReport:
        with self._clock.paused():
            return await self._parts.push_weights(self.version + 1)

    def _release(self) -> tuple[JudgedGroup, ...]:
        """The batch was stepped: count it, and make room."""
        batch, self.batch = tuple(self.batch), []
        early, self._early = self._early, set()
        oldest = max(self.version - group.version for group in batch)
        self.max_staleness_trained = max(self.max_staleness_trained, oldest)
        assert self.max_staleness_trained <= self._config.max_staleness
        self._flight.trained(batch, early)
        return batch

    @property
    def _makes_room(self) -> bool:
        """Whether the end of the open batch will let new groups in: not in the last steps."""
        last = self.version + self._config.max_staleness + 1 >= self._config.num_steps
        return not last and not self._flight.prompts_over

    async def give_up(self) -> None:
        """The prompts are over and what is left fills no batch."""
        await self._parts.trainer.discard()
        log.warning("no more prompts: %d groups of an incomplete batch are dropped", len(self._flight.groups))
        self.batch, self._early = [], set()
        self._flight.give_up()

    def _report_wait(self) -> None:
        waiting = [f"{group.group_id} ({describe(group)})" for group in self._flight.open_groups]
        log.warning("the learner waits for groups; pending: %s", "; ".join(waiting[:8]) or "none")
