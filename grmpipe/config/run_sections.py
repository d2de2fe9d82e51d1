"""The sections of a run's configuration, and what follows from them. Checks nothing, chooses nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Self

from grmpipe.config.capacity import PlanConfig, SimulateConfig
from grmpipe.config.critic import CriticConfig
from grmpipe.config.data import DataConfig, RolloutConfig
from grmpipe.config.env import EnvConfig
from grmpipe.config.evaluation import EvaluateConfig, MetaRmConfig, RftConfig
from grmpipe.config.grm import GrmConfig, GrmTrainConfig
from grmpipe.config.judge import JudgeConfig, LabelConfig
from grmpipe.config.judge_monitor import JudgeMonitorConfig
from grmpipe.config.judging import (
    GRM,
    JUDGE,
    LEARNER,
    POLICY,
    Judging,
)
from grmpipe.config.reward import RewardConfig, RewardTree
from grmpipe.config.tracking import TrackingConfig
from grmpipe.config.train import (
    AlgorithmConfig,
    TrainConfig,
)
from models.engines.engine_kind import AnyEngine
from models.settings import EngineConfig, ModelConfig, ParallelConfig
from scheduler.placement import ClusterConfig, PlacementConfig
from scheduler.slots.balance import BalanceConfig
from scheduler.slots.health import HealthConfig
from scheduler.weights.weight_sync import SyncConfig

TASKS = ("train", "train_judge_rft", "train_meta_rm", "evaluate", "plan", "simulate", "report", "doctor")
RESUMES = ("never", "auto")
ENV = "env"  # the role of hosts of environments
ROLES = ("policy", "learner", "grm", "grm_learner", "meta_rm", "critic", ENV)  # roles that every placement may seat


@dataclass(frozen=True)
class RunSections:
    """All that a user can set, by section."""

    # The task: train a model, imitate a GRM's own right critiques, train a meta-RM, measure a judge, plan or simulate
    # the run, write a run's report, or check what is installed.
    task: str = "train"
    experiment_name: str = "default"  # Name of the run, and of its folder in runs/.
    seed: int = 0  # Seed of all random draws: the order of prompts, sampling, judging, the split of batches.
    # Directory of the run; null: a new one, runs/<experiment_name>/<date>_<time>.
    run_dir: str | None = None
    # Continue the run in run_dir (null: the experiment's newest of the same task) from its last complete checkpoint, if
    # there is one (auto), or start a new run (never).
    resume: str = "never"
    # Path to a number in summary.json, which the run returns to a sweep.
    objective: str = "eval.final.grm_score"
    policy: ModelConfig = field(default_factory=ModelConfig)
    grm: GrmConfig = field(default_factory=lambda: GrmConfig(path="tiny://grm"))
    # Further models that judge: `+grm@models.<name>=<file>`. The name is the role of its engines in the placement.
    models: dict[str, GrmConfig] = field(default_factory=dict)
    meta_rm: MetaRmConfig = field(default_factory=MetaRmConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    # Further judges: `+judge@judges.<name>=<file>`.
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    reward: RewardConfig = field(default_factory=RewardConfig)
    # Further compositions, which others name: `+reward@rewards.<name>=<file>`.
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    labels: LabelConfig = field(default_factory=LabelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rft: RftConfig = field(default_factory=RftConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    judge_monitor: JudgeMonitorConfig = field(default_factory=JudgeMonitorConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)

    def on_gpu(self, role: str) -> bool:
        """Whether the role's place has GPUs. A role without a place counts as on cores."""
        where = self.placement.roles.get(role)
        pool = self.placement.pools.get(where.pool) if where is not None else None
        return pool is not None and pool.resource == "gpu"

    @property
    def all_judges(self) -> dict[str, JudgeConfig]:
        """Name -> judge, including those that the reward doesn't use."""
        return {JUDGE: self.judge, **self.judges}

    @property
    def first_judge(self) -> JudgeConfig:
        """The judge on whose scale labels and the scores of all judges together are."""
        return self.all_judges[self.judging.first]

    def with_judge(self, name: str, judge: JudgeConfig) -> Self:
        """The configuration with another judge in the place of one."""
        if name == JUDGE:
            return dataclasses.replace(self, judge=judge)
        return dataclasses.replace(self, judges={**self.judges, name: judge})

    @property
    def reward_tree(self) -> RewardTree:
        """The composition that makes the reward, with those that it may name."""
        return RewardTree(self.reward, self.rewards)

    @functools.cached_property
    def judging(self) -> Judging:
        """The judges that the reward uses, and the models that they may ask."""
        known = self.all_judges
        return Judging({name: known[name] for name in self.reward_tree.judges()}, self.models_by_role)

    def may_ask(self, role: str, source: str) -> bool:
        """Whether a model that judges may be asked about prompts of a source."""
        return not self.judging.asking(role).keys().isdisjoint(self.reward_tree.judges(source))

    @property
    def judged_by_model(self) -> bool:
        """Whether a language model judges, here or remote."""
        return bool(self.judging.generative)

    @property
    def models_by_role(self) -> dict[str, ModelConfig]:
        """Role -> model, for every model that engines may serve."""
        return {POLICY: self.policy, GRM: self.grm, **self.models}

    @property
    def served(self) -> tuple[str, ...]:
        """Roles that engines serve in this run, here or remote."""
        return (POLICY, *self.judging.roles)

    @property
    def learners(self) -> dict[str, str]:
        """Role whose weights are trained -> role that trains it. Nothing learns in an evaluation."""
        if self.task == "evaluate":
            return {}
        return {POLICY: "learner"} | {role: role + LEARNER for role in self.trained_grms}

    @property
    def parallel(self) -> dict[str, ParallelConfig]:
        """Role that trains a model -> how its ranks share it."""
        judging = {role + LEARNER: train.parallel for role, train in self.trained_grms.items()}
        return {"learner": self.train.parallel, "critic": self.critic.parallel, **judging}

    def judge_training(self, role: str) -> JudgeConfig:
        """The judge whose prompts, limits and temperature a GRM in training learns under."""
        return self.judging.judges[self.judging.first_asking(role)]

    @property
    def trained_grms(self) -> dict[str, GrmTrainConfig]:
        """Role -> settings of its learner, for the GRMs that are trained next to the policy."""
        return {role: model.train for role, model in {GRM: self.grm, **self.models}.items() if model.train.enabled}

    def engine_kind_of(self, role: str) -> type[AnyEngine]:
        return self.judging.engine_kind_of(role)

    @property
    def uses_meta_rm(self) -> bool:
        """Whether the vote uses a meta-RM. One in training weights no vote."""
        weights_no_vote = self.task == "train_meta_rm" or self.data.retrain_from is not None
        return bool(self.judging.weighted) and not weights_no_vote

    @property
    def plays(self) -> bool:
        """Whether the policy plays: an evaluation of a judge alone plays nothing."""
        return self.task != "evaluate" or self.evaluate.what != "judge"

    @property
    def places_envs(self) -> bool:
        """Whether environments live in hosts of their own, on slots of a pool; else in the run itself."""
        return ENV in self.placement.roles and self.plays

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that need a place."""
        if self.data.retrain_from is not None:
            return ("learner",)
        asks_critic = self.critic.enabled and self.task != "evaluate"
        learners = tuple(learner for role, learner in self.learners.items() if role != POLICY)
        more = ("meta_rm",) * self.uses_meta_rm + ("critic",) * asks_critic + (ENV,) * self.places_envs
        judging = (*self.judging.local_roles, *self.judging.scorer_roles)
        return (POLICY, "learner", *judging, *learners, *more)


def is_judge_simulated(judge: JudgeConfig) -> bool:
    """Whether a simulation knows the judge, and the number of scores in a judgement."""
    return judge.kind in ("rule", "label") or (judge.kind == "generative" and judge.protocol_kind.scores == "responses")


def roles_with(models: Collection[str]) -> tuple[str, ...]:
    """The roles that a placement may seat, in a run with these further models."""
    return (*ROLES, *(name for role in models for name in (role, role + LEARNER)))
