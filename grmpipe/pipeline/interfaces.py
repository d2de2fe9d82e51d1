"""The interfaces of the pipeline: its components, its settings, its reports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from grmpipe.config.data import RolloutConfig
from grmpipe.config.env import EnvConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.envs.episode_slots import EpisodeSlots
from grmpipe.envs.play import Play
from grmpipe.pipeline.stall_times import StallTimes
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.weights.weight_push import SyncReport
from grmpipe.types import GroupEnd, Judge, JudgedGroup, JudgeReport, Metrics, Prompt, Rollout

KILLED_ENGINES = "rollout_killed_engines"  # the cause of dropping such a group


RolloutKey = tuple[str, int]  # group_id, sibling


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBatch:
    """What the learner reports of a batch.

    advantages: the mean over a rollout's trained tokens; rollouts without advantages are left out.
    """

    metrics: Metrics = field(default_factory=dict)
    advantages: Mapping[RolloutKey, float] = field(default_factory=dict)


class Prompts(Protocol):
    def at(self, prompt_index: int) -> Prompt:
        """The prompt at an index. Raises EndOfData at the end of the data set."""
        ...


class Trainer(Protocol):
    """The learner as the pipeline sees it."""

    async def take(self, group: JudgedGroup) -> None: ...

    async def while_waiting(self) -> bool:
        """Train on the groups taken so far, if that is worth it, while the batch isn't full and no group is ready.

        Returns whether it did. A replay must do so at the same places: gradients summed in other parts differ in their
        last bits.
        """
        ...

    async def step(self, batch: Sequence[JudgedGroup]) -> TrainedBatch:
        """End the batch. `batch`: the groups taken since the last step, in that order."""
        ...

    async def discard(self) -> None: ...


class GroupJournal(Protocol):
    """A record of finished work."""

    def rollout(self, prompt_index: int, prompt: Prompt, rollout: Rollout) -> None: ...

    def record_verdict(self, rollout: Rollout, report: JudgeReport) -> None: ...

    def group_ended(self, end: GroupEnd) -> None: ...


class JudgeGuard(Protocol):
    """Decides from its verdicts whether a judge is fit. Raises when it is unfit for good."""

    def verdict(self, report: JudgeReport) -> None: ...

    async def until_fit(self, clock: ActiveClock) -> None: ...


class Valuer(Protocol):
    """Computes values of groups that are rolled out, before the open batch takes them. Keeps no group of its own."""

    def watch(self, rolled_out: Callable[[], Sequence[Sequence[Rollout]]]) -> None:
        """Set how the rollouts of such groups are found, group by group, the most urgent first."""
        ...

    def groups_changed(self) -> None:
        """A group may have become one of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineComponents:
    """The components of the pipeline."""

    prompts: Prompts
    too_long: Callable[[Prompt], bool]
    play: Play
    judge: Judge
    judge_guard: JudgeGuard
    trainer: Trainer
    push_weights: Callable[[int], Awaitable[SyncReport]]
    journal: GroupJournal
    events: EventSink
    slots: EpisodeSlots = field(default_factory=EpisodeSlots)  # for episodes; by default without a limit
    valuer: Valuer | None = None  # for estimators that need values


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig:
    """Settings of the flow."""

    num_steps: int
    groups_per_batch: int
    group_size: int
    min_valid_siblings: int
    max_staleness: int
    group_deadline_s: float
    rollout_concurrency: int
    judge_concurrency: int
    seed: int
    group_prefix: str = "g"  # begins every group_id; each of two flows in one run has its own
    rollout_max_failure_rate: float = 1.0  # share of groups that the policy's engines fail; 1: no limit
    env_max_failure_rate: float = 1.0  # share of episodes that the environment fails; 1: no limit
    pause_s: float = 30.0  # after too many of either
    truncated: str = "train"  # what becomes of a truncated rollout: rollout.truncated
    max_skipped_steps: int = 0  # batches that may be dropped because their numbers aren't finite
    max_zero_advantage_groups: int = 0  # at most this many are dropped and replaced in one step
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)  # decides whether they are alike
    deterministic: bool = False  # take groups in the order of their prompts; settle all open ones before a push
    policy_judges: bool = False  # the policy judges itself: a push changes the judge too
    keeps_whole_groups: bool = False  # a resume keeps the verdicts of a group only if it has all of them
    report_wait_s: float = 60.0  # log what the learner waits for after this long

    @staticmethod
    def of(
        train: TrainConfig,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        judge_concurrency: int,
        seed: int,
        env: EnvConfig,
    ) -> FlowConfig:
        """The settings of the policy's flow in a run."""
        return FlowConfig(
            num_steps=train.num_steps,
            groups_per_batch=train.groups_per_batch,
            group_size=train.group_size,
            min_valid_siblings=train.min_valid_siblings,
            max_staleness=train.max_staleness,
            truncated=rollout.truncated,
            max_skipped_steps=train.max_skipped_steps,
            group_deadline_s=rollout.group_deadline_s,
            rollout_concurrency=rollout.max_concurrency,
            judge_concurrency=judge_concurrency,
            seed=seed,
            rollout_max_failure_rate=rollout.max_failure_rate,
            env_max_failure_rate=env.max_failure_rate,
            pause_s=rollout.pause_s,
            max_zero_advantage_groups=int(algorithm.dynamic_sampling_batches * train.groups_per_batch),
            algorithm=algorithm,
            deterministic=train.deterministic,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedWork:
    """Work of a group that was finished after the counts of a checkpoint were taken: what a resume keeps, and what it
    makes void.
    """

    rollouts: tuple[Rollout, ...] = ()
    reports: tuple[JudgeReport, ...] = ()
    void_rollouts: tuple[Rollout, ...] = ()
    void_reports: tuple[JudgeReport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredGroup:
    """Finished work of a group from before a resume: its rollouts, and the verdicts it has.

    `renamed`: other work under its old name is void, so the kept work continues, and is journalled, under a new one.
    `killed_engines`: its requests killed engines, so no more are sent.
    `begun_version`: the lowest version in the turns of rollouts that go on; None: there is no such rollout.
    """

    group_id: str
    renamed: bool = False
    killed_engines: bool = False
    begun_version: int | None = None
    rollouts: tuple[Rollout, ...] = ()
    reports: Mapping[int, JudgeReport] = field(default_factory=dict)
    uncounted: UncountedWork = field(default_factory=UncountedWork)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState:
    """The state of the flow between two optimizer steps, as a checkpoint stores it."""

    version: int = 0
    next_prompt_index: int = 0
    in_flight: Mapping[int, str] = field(default_factory=dict)  # prompt index -> group_id
    dropped: Mapping[str, int] = field(default_factory=dict)
    max_staleness_trained: int = 0
    judge_version: int = 0  # optimizer steps of the models that judge and train in the same run
    num_resampled: int = 0  # zero-advantage groups dropped since the last step


@dataclass(slots=True, kw_only=True)
class RolloutTimes:
    """When a rollout began and ended, and when its verdict came (None: not yet), on the event loop's clock."""

    began_s: float
    ended_s: float
    judged_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A report of one optimizer step. `step` is the version it made; times are in seconds."""

    step: int
    groups: tuple[JudgedGroup, ...]
    learner: Metrics
    sync: SyncReport
    stalls: StallTimes  # with the duration of the step
    policy_idle_s: float  # time without a rollout in flight: admission was closed, the learner was behind
    advantages: Mapping[RolloutKey, float] = field(default_factory=dict)  # as in TrainedBatch
    times: Mapping[RolloutKey, RolloutTimes] = field(default_factory=dict)  # for rollouts that this process played

    @property
    def learner_busy_s(self) -> float:
        """Time in which the learner neither waited for groups nor pushed weights."""
        return self.stalls.steps_s - self.stalls.for_groups_s - self.stalls.weight_sync_s
