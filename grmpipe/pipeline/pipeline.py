"""The flow of training, and nothing else. One loop for synchronous and asynchronous training.

The life of a group. GroupBuffer holds all groups, in these states; the loops hold none.

               admit               play              judge            train             train
    prompts ----------> ROLLING_OUT ------> JUDGING ---------> READY ---------> TAKEN -----------> TRAINED
       ^                     |                 |                 |                |     step, push    |
       |                     +-----------------+----+------------+----------------+                   |
       |                      by expire, or a failure |                                               |
       |                                              v                                               |
       +------------------- room ------------------ DROPPED                                           |
       +------------------- room, and a new version of the policy ------------------------------------+

The loops run concurrently until `train` is done:

admit   consumes      prompts: first those whose groups a resume reopens, then the next of the data
        produces      ROLLING_OUT groups: their siblings for play, the groups themselves for expire
        waits for     a judge that is fit; room; the pace of batches; a policy that is fit; a place in play's inbox
        unblocked by  the judge's monitor; a step or a dropped group; time; the rollout gate; a rollout's end
play    consumes      siblings of open groups, up to `rollout_concurrency` at once
        produces      rollouts, and with each what can be judged now, for judge
        waits for     the policy's engines
        unblocked by  an answer, which a replaced engine may give; the end of its group, which cancels it
judge   consumes      what can be judged, of the groups that are due first, up to `judge_concurrency` at once
        produces      verdicts: the last one makes its group READY, or drops it
        waits for     a judge that is fit; the judging gate (held while a GRM warms up or is pushed); the GRM's engines
        unblocked by  the judge's monitor; the gate opens; an answer; the end of its group, which cancels it
expire  consumes      open groups, all at once
        produces      ends at the deadline: missing verdicts are timeouts, a missing rollout drops the group
        waits for     the deadline, on a clock that stands still during pushes and pauses
        unblocked by  time; the end of the group, which cancels it
train   consumes      READY groups, those that are due first before the others
        produces      gradients, steps, versions of the policy, room
        waits for     a group that the open batch may take; `why_waiting` gives each group's reason;
                      in a deterministic run, before a push, the end of every group in ROLLING_OUT or JUDGING
        unblocked by  news: a group left ROLLING_OUT or JUDGING, the prompts are over, or an interrupt
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

from grmpipe.data.stream import EndOfData
from grmpipe.pipeline.consumer import Consumer, OnSkipped, ignore_skipped
from grmpipe.pipeline.counters import FlowCounters
from grmpipe.pipeline.group import OPEN, GroupState
from grmpipe.pipeline.group_buffer import GroupBuffer
from grmpipe.pipeline.interfaces import FlowConfig, PipelineComponents, PipelineState, RecoveredGroup, StepReport
from grmpipe.pipeline.producer import Producer
from grmpipe.pipeline.stall_times import GroupSupply, StallTracker
from grmpipe.pipeline.why_waiting import BatchProgress, measure_batch
from grmpipe.scheduler.admission import Ledger
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.run_together import run_until
from grmpipe.types import JudgedGroup

T = TypeVar("T")


class Pipeline:
    """Runs the flow from a given state until `num_steps` are done, the prompts are over, or it is interrupted."""

    def __init__(
        self,
        components: PipelineComponents,
        config: FlowConfig,
        after_step: Callable[[StepReport], Awaitable[None]],
        pipeline_state: PipelineState | None = None,
        kept: Mapping[int, RecoveredGroup] | None = None,
        on_skipped: OnSkipped = ignore_skipped,
    ) -> None:
        """`kept`: prompt index -> the finished work that a resume found. on_skipped: see Consumer."""
        pipeline_state = pipeline_state or PipelineState()
        self.clock = ActiveClock()
        self.counters = FlowCounters()
        self.after_step = after_step
        self._stalls = StallTracker()
        self._valuer = components.valuer
        self._buffer = GroupBuffer(
            config, components.journal, on_change=self._groups_changed, pipeline_state=pipeline_state, kept=kept
        )
        self._producer = Producer(
            components,
            config,
            self._buffer,
            self._stalls.engines,
            self.clock,
            self.counters,
            pipeline_state.judge_version,
        )
        if self._valuer is not None:
            self._valuer.watch(lambda: [group.rollouts for group in self._buffer.untaken.list_rolled_out()])
        playing = self._producer.playing.meter
        if config.policy_judges:
            push = components.push_weights  # it also pushes to the judge: no group is judged by two versions
            components = replace(components, push_weights=lambda version: self.change_judge(1, lambda: push(version)))
        self._consumer = Consumer(
            components,
            config,
            self._buffer,
            self._stalls,
            self.clock,
            playing,
            self._stepped,
            on_skipped,
            is_paused=lambda: bool(self.why_paused),
        )

    @property
    def version(self) -> int:
        """Completed optimizer steps of this flow."""
        return self._buffer.version

    @property
    def why_paused(self) -> str:
        """Why judging paused for the rest of this process, at the bound of a budget; empty: it didn't."""
        return self._producer.why_paused

    @property
    def ledger(self) -> Ledger:
        """The number of groups submitted, and what became of them."""
        return self._buffer.counts()

    @property
    def open_batch(self) -> tuple[JudgedGroup, ...]:
        """The groups that the learner has taken since its last step."""
        return self._buffer.batch

    @property
    def max_staleness_trained(self) -> int:
        """The largest staleness of a trained group, in steps."""
        return self._buffer.ledger.max_staleness_trained

    @property
    def is_rolled_out(self) -> bool:
        """Whether all groups have their rollouts, and none may be opened under this version any more."""
        return self._buffer.is_done_with(GroupState.ROLLING_OUT)

    @property
    def is_settled(self) -> bool:
        """Whether no group lacks a rollout or a verdict, and none may be opened under this version any more."""
        return self._buffer.is_done_with(*OPEN)

    @property
    def batch_progress(self) -> BatchProgress:
        """How far the open batch is."""
        return measure_batch(self._buffer, self._stalls.learner_state)

    def state(self) -> PipelineState:
        """The state of the flow now."""
        return self._buffer.ledger.state(self._buffer.groups.values(), self._producer.judge_version)

    @property
    def playing_s(self) -> float:
        """Seconds with a rollout in flight."""
        return self._producer.playing.meter.busy_s

    @property
    def judging_s(self) -> float:
        """Seconds with a judge task in flight."""
        return self._producer.judging.meter.busy_s

    def hold_judging(self) -> AbstractContextManager[None]:
        """Context: no judge task begins, and the deadlines of groups stand still."""
        return self._producer.judging_gate.hold()

    async def change_judge(self, steps: int, change: Callable[[], Awaitable[T]]) -> T:
        """Bring a model that judges to weights of `steps` more optimizer steps, or a rubric to as many more versions:
        `Producer.change_judge`.
        """
        return await self._producer.change_judge(steps, change)

    def interrupt(self) -> None:
        """Stop between this step and the next: `run` raises Interrupted."""
        self._consumer.interrupt()

    async def run(self) -> None:
        """Run until all steps are done or the prompts are over. Raises Interrupted; the first crash of any stage is
        raised as it is.
        """
        try:
            await run_until(
                self._consumer.run(),
                admit=self._producer.admit(),
                play=self._producer.playing.run(),
                judge=self._producer.judging.run(),
                expire=self._producer.expiring.run(),
            )
        except EndOfData:
            await self._consumer.give_up()

    def _groups_changed(self, supply: GroupSupply) -> None:
        self._stalls.groups_changed(supply)
        if self._valuer is not None:
            self._valuer.groups_changed()

    async def _stepped(self, report: StepReport) -> None:
        self.counters.add_stalls(report.stalls, report.sync.pause_seconds)
        await self.after_step(report)
