"""What the pipeline is put together from, what it is told, and what it tells. No behaviour."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from grmpipe.config.data import RolloutConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.envs.play import Play
from grmpipe.pipeline.stall_times import StallTimes
from grmpipe.types import GroupEnd, Judge, JudgedGroup, JudgeReport, Metrics, Prompt, Rollout
from scheduler.clock import ActiveClock
from scheduler.events import EventSink
from scheduler.weights.weight_sync import SyncReport

KILLED_ENGINES = "rollout_killed_engines"  # the cause of a group that is dropped for it


class Prompts(Protocol):
    def at(self, prompt_index: int) -> Prompt:
        """The prompt at an index. Raises EndOfData when the data set is over."""
        ...


class Trainer(Protocol):
    """The learner's side of a batch."""

    async def take(self, group: JudgedGroup) -> None: ...

    async def while_waiting(self) -> bool:
        """The batch isn't full and no group is ready: go on with what was taken, where that is worth it.

        Returns whether it went on. A replay has to at the same places: gradients that are summed in other parts differ
        in their last bits."""
        ...

    async def step(self, batch: Sequence[JudgedGroup]) -> Metrics:
        """End the batch: the groups that were taken since the last step, in that order."""
        ...

    async def discard(self) -> None: ...


class GroupJournal(Protocol):
    """Where finished work is kept."""

    def rollout(self, prompt_index: int, prompt: Prompt, rollout: Rollout) -> None: ...

    def judged(self, rollout: Rollout, report: JudgeReport) -> None: ...

    def group_ended(self, end: GroupEnd) -> None: ...


class JudgeGuard(Protocol):
    """Decides from its verdicts whether a judge is fit. Raises when it is not, for good."""

    def verdict(self, report: JudgeReport) -> None: ...

    async def until_fit(self, clock: ActiveClock) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineComponents:
    """What the pipeline is put together from."""

    prompts: Prompts
    too_long: Callable[[Prompt], bool]
    play: Play
    judge: Judge
    judge_guard: JudgeGuard
    trainer: Trainer
    push_weights: Callable[[int], Awaitable[SyncReport]]
    journal: GroupJournal
    events: EventSink


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig:
    """The numbers of the flow."""

    num_steps: int
    groups_per_batch: int
    group_size: int
    min_valid_siblings: int
    max_staleness: int
    group_deadline_s: float
    rollout_concurrency: int
    judge_concurrency: int
    seed: int
    group_prefix: str = "g"  # of group_ids; of two flows in one run each has its own
    rollout_max_failure_rate: float = 1.0  # of groups that the policy's engines fail; 1: whatever they do
    rollout_failure_window: int = 32  # groups
    rollout_pause_s: float = 30.0
    max_zero_advantage_groups: int = 0  # dropped and replaced in one step, where a group's rewards are all alike
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)  # to which they are alike or not
    report_wait_s: float = 60.0  # a wait longer than this names what it waits for

    @staticmethod
    def of(
        train: TrainConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig, judge_concurrency: int, seed: int
    ) -> FlowConfig:
        """Of the policy's flow in a run."""
        return FlowConfig(
            num_steps=train.num_steps,
            groups_per_batch=train.groups_per_batch,
            group_size=train.group_size,
            min_valid_siblings=train.min_valid_siblings,
            max_staleness=train.max_staleness,
            group_deadline_s=rollout.group_deadline_s,
            rollout_concurrency=rollout.max_concurrency,
            judge_concurrency=judge_concurrency,
            seed=seed,
            rollout_max_failure_rate=rollout.max_failure_rate,
            rollout_failure_window=rollout.failure_window,
            rollout_pause_s=rollout.pause_s,
            max_zero_advantage_groups=int(algorithm.dynamic_sampling_batches * train.groups_per_batch),
            algorithm=algorithm,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredGroup:
    """Finished work of a group from before a resume: its rollouts, and the verdicts it has.

    `renamed`: other work under its old name is void, so what is kept goes on, and to the journal, under a new one.
    `killed_engines`: its requests did, so it is asked for nothing any more.
    """

    group_id: str
    renamed: bool = False
    killed_engines: bool = False
    rollouts: tuple[Rollout, ...] = ()
    reports: Mapping[int, JudgeReport] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState:
    """Where the flow stands between two optimizer steps: what a checkpoint keeps of it."""

    version: int = 0
    next_prompt_index: int = 0
    in_flight: Mapping[int, str] = field(default_factory=dict)  # prompt index -> group_id
    dropped: Mapping[str, int] = field(default_factory=dict)
    max_staleness_trained: int = 0
    judge_version: int = 0  # of a judge that learns in the same run


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step. `step` is the version it made; times are seconds."""

    step: int
    groups: tuple[JudgedGroup, ...]
    learner: Metrics
    sync: SyncReport
    stalls: StallTimes  # and how long the step took
    learner_busy_s: float
    policy_idle_s: float  # no rollout in flight: admission was shut, the learner is behind
