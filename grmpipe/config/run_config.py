"""RunConfig: everything a user can set, by section, with the checks across sections. Starts nothing."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from grmpipe.config.capacity import PlanConfig, SimulateConfig
from grmpipe.config.cotrain import CotrainConfig
from grmpipe.config.critic import CriticConfig, check_critic
from grmpipe.config.data import DataConfig, RolloutConfig
from grmpipe.config.engine_kinds import engines_that
from grmpipe.config.env import EnvConfig
from grmpipe.config.evaluation import EvaluateConfig, MetaRmConfig, RftConfig
from grmpipe.config.judge import JudgeConfig, LabelConfig
from grmpipe.config.judge_monitor import JudgeMonitorConfig
from grmpipe.config.judging import (
    GRM,
    JUDGE,
    LEARNER,
    POLICY,
    Judging,
    check_all_used,
    check_judging,
    check_names,
    key_of_cotrain,
    key_of_judge,
    key_of_model,
)
from grmpipe.config.reward import RewardConfig, check_rewards, judges_of
from grmpipe.config.tracking import TrackingConfig
from grmpipe.config.train import (
    AlgorithmConfig,
    TrainConfig,
    check_interpolated,
    check_pass_k,
    check_replay_buffer,
    check_spread,
)
from models.engines.engine_kind import AnyEngine
from models.settings import AUTO, EngineConfig, ModelConfig
from scheduler.placement import ClusterConfig, PlacementConfig
from scheduler.slots.balance import BalanceConfig
from scheduler.slots.health import HealthConfig
from scheduler.weights.weight_sync import SyncConfig

TASKS = ("train", "train_judge_rft", "train_meta_rm", "evaluate", "plan", "simulate", "report", "doctor")
RESUMES = ("never", "auto")
ROLES = ("policy", "learner", "grm", "grm_learner", "meta_rm", "critic")  # roles that every placement may seat
BY_DEVICE = {True: "bfloat16", False: "float32"}  # the meaning of dtype=auto, on a GPU and elsewhere


class ConfigError(ValueError):
    """A bad configuration, in words a user can act on. Exit code 2."""


@dataclass(frozen=True)
class RunConfig:
    """The settings of one run."""

    # The task: train a model, imitate a GRM's own right critiques, train a meta-RM, measure a judge, plan or simulate
    # the run, write a run's report, or check what is installed.
    task: str = "train"
    experiment: str = "default"  # Name of the run, and of its folder in runs/.
    seed: int = 0  # Seed of all random draws: the order of prompts, sampling, judging, the split of batches.
    # Directory of the run; null: a new one, runs/<experiment>/<date>_<time>.
    run_dir: str | None = None
    # Continue the run in run_dir (null: the newest of the experiment) from its last complete checkpoint, if there is
    # one (auto), or start a new run (never).
    resume: str = "never"
    # Path to a number in summary.json, which the run returns to a sweep.
    objective: str = "eval.final.grm_score"
    policy: ModelConfig = field(default_factory=ModelConfig)
    grm: ModelConfig = field(default_factory=lambda: ModelConfig(path="tiny://grm"))
    # Further models that judge: `+grm@grms.<name>=<file>`. The name is the role of its engines in the placement.
    grms: dict[str, ModelConfig] = field(default_factory=dict)
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
    cotrain: CotrainConfig = field(default_factory=CotrainConfig)
    # The learners of further models, by the model's name: `+cotrains={<name>: {enabled: true}}`.
    cotrains: dict[str, CotrainConfig] = field(default_factory=dict)
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

    def __post_init__(self) -> None:
        self._check_judges()
        self._seat_models()
        self._choose_by_device()
        if self.task not in TASKS:
            raise ValueError(f"task: unknown task {self.task!r}; known: {', '.join(TASKS)}")
        if self.resume not in RESUMES:
            raise ValueError(f"resume: unknown value {self.resume!r}; known: {', '.join(RESUMES)}")
        if not re.fullmatch(r"[\w-][\w.-]*", self.experiment):  # it names a folder under runs/
            raise ValueError(
                f"experiment: may hold letters, digits, '_', '-' and, not as the first, '.', got {self.experiment!r}"
            )
        check_pass_k(self.algorithm, self.train.group_size)
        check_replay_buffer(self.algorithm, self.train.max_staleness)
        check_interpolated(self.algorithm, self.train.max_staleness)
        for judge in self.judging.generative.values():
            check_spread(self.algorithm, judge.num_judgements)
        check_critic(self.critic, self.algorithm, self.train)
        self._check_engines()
        known = roles_with(self.grms)
        for role in self.placement.roles:
            if role not in known:
                raise ValueError(f"placement.roles.{role}: there is no such role; known: {', '.join(known)}")
        self._check_replay()
        self._check_cotrain()
        self._check_critic()
        self._check_lora()
        self._check_meta()
        self._check_scalar()
        self._check_simulated()
        if self.judge.kind == "label" or self.trained_grms:
            self._check_labels()
        if self.task == "train_judge_rft" and self.judge.kind != "label":
            raise ValueError(
                "task: train_judge_rft learns from labelled judgements; type judge=label data.path=... as well"
            )

    def _check_judges(self) -> None:
        """Check the judges, the models that they ask, and the reward that is made of their verdicts."""
        check_names("grms", self.grms)
        check_names("judges", self.judges)
        self._choose_engines()
        kind = self.algorithm.estimator_kind
        check_rewards(
            self.reward, self.rewards, self.all_judges, group_baseline=kind.need == "group" and not kind.needs_critic
        )
        check_judging(self.judging)
        if self.task != "evaluate":  # which measures any one of them
            check_all_used(self.judging, self.judges, self.grms)
        if len(self.judging.judges) > 1 and (label := self._judge_of_kind("label")) is not None:
            raise ValueError(f"{key_of_judge(label)}.kind: label is for a judge in training, alone; type reward=single")

    def _judge_of_kind(self, kind: str) -> str | None:
        return next((name for name, judge in self.judging.judges.items() if judge.kind == kind), None)

    def _check_engines(self) -> None:
        """Check that the policy's engines take weights."""
        if not self.engine_kind_of(POLICY).transports:
            able = " or ".join(engines_that(lambda kind: bool(kind.transports)))
            raise ValueError(
                f"policy.engine: {self.policy.engine} can't receive weights or return log-probs, so it can't serve a "
                f"model in training; type policy.engine={able}"
            )

    def _choose_engines(self) -> None:
        """Give the models without an engine of their own that of `engine.kind`."""
        self._set_models(
            {
                role: dataclasses.replace(model, engine=self.engine.kind)
                for role, model in self.models.items()
                if not model.engine
            }
        )

    def _set_models(self, models: dict[str, ModelConfig]) -> None:
        """Replace some models."""
        first = {role: model for role, model in models.items() if role in (POLICY, GRM)}
        for name, section in first.items():
            object.__setattr__(self, name, section)
        object.__setattr__(self, "grms", self.grms | {r: m for r, m in models.items() if r not in first})
        self.__dict__.pop("judging", None)

    def _seat_models(self) -> None:
        """Give further models without a place that of the first one, and their learners that of its learner."""
        roles = dict(self.placement.roles)
        for role in self.grms:
            for own, first in ((role, GRM), (role + LEARNER, GRM + LEARNER)):
                if own not in roles and first in roles:
                    roles[own] = roles[first]
        object.__setattr__(self, "placement", dataclasses.replace(self.placement, roles=roles))

    def _choose_by_device(self) -> None:
        """Replace `auto` and null by values for the device of each role: no other code asks for the device again."""
        self._set_models(
            {
                role: dataclasses.replace(model, dtype=BY_DEVICE[self.on_gpu(role)])
                for role, model in self.models.items()
                if model.dtype == AUTO
            }
        )
        train, on_gpu = self.train, self.on_gpu("learner")
        if train.dtype == AUTO:
            train = dataclasses.replace(train, dtype=BY_DEVICE[on_gpu])
        if train.activation_checkpointing is None:
            train = dataclasses.replace(train, activation_checkpointing=on_gpu)
        object.__setattr__(self, "train", train)

    def on_gpu(self, role: str) -> bool:
        """Whether the role's place has GPUs. A role without a place counts as on cores."""
        where = self.placement.roles.get(role)
        pool = self.placement.pools.get(where.pool) if where is not None else None
        return pool is not None and pool.resource == "gpu"

    def _check_labels(self) -> None:
        learning = {name: judge for name, judge in self.judging.judges.items() if judge.kind == "label"} | {
            name: judge for role in self.trained_grms for name, judge in self.judging.asking(role).items()
        }
        for name, judge in learning.items():
            key = key_of_judge(name)
            if not judge.score_min < self.labels.pass_score <= judge.score_max:
                raise ValueError(
                    f"labels.pass_score: must be above {key}.score_min = {judge.score_min} and at most "
                    f"{key}.score_max = {judge.score_max}, got {self.labels.pass_score}"
                )

    def _check_replay(self) -> None:
        """Check that retraining from a run trains only the policy."""
        if self.data.retrain_from is None:
            return
        if self.task != "train":
            raise ValueError(
                f"data.retrain_from: task={self.task} can't replay; type task=train, or data.retrain_from=null"
            )
        alone = "data.retrain_from trains only the policy"
        for role in self.trained_grms:
            key = key_of_cotrain(role)
            raise ValueError(f"{key}.enabled: {alone}; type {key}.enabled=false")
        if self.critic.enabled:
            raise ValueError(f"critic.enabled: {alone}; type critic=none algorithm.estimator=grpo")

    def _check_meta(self) -> None:
        """Check that a vote that needs a meta-RM has one, with something to read."""
        if not self.uses_meta_rm:
            return
        name, judge = next(iter(self.judging.weighted.items()))
        key = f"{key_of_judge(name)}.vote"
        if self.task == "simulate":
            raise ValueError(
                f"{key}: task=simulate asks no meta-RM, whose work is small compared with the GRM's; type task=plan "
                f"for its work and memory, or {key}=mean to simulate the rest of the run"
            )
        if self.meta_rm.path is None:
            raise ValueError(
                f"meta_rm.path: {key}={judge.vote} needs a meta-RM, and there is none; train one by "
                f"+experiment=train_meta_rm and type meta_rm.path=<its run_dir>/meta_rm, or {key}=mean"
            )

    def _check_lora(self) -> None:
        """Check that adapters belong to a model that learns and go to an engine that applies them."""
        for role, model in self.models.items():
            key = key_of_model(role)
            if model.lora.in_engines and not self.engine_kind_of(role).applies_adapters:
                able = " or ".join(engines_that(lambda kind: kind.applies_adapters))
                raise ValueError(
                    f"{key}.lora.sync: {model.engine} can't receive adapters alone; type {key}.lora.sync=merged, "
                    f"or {key}.engine={able}"
                )
            # If the policy is the judge itself, it takes its settings from the GRM's.
            if model.lora.learns and role not in self.learners and self.judge.kind != "label":
                cotrain = key_of_cotrain(role)
                raise ValueError(
                    f"{key}.lora.rank: the GRM doesn't learn in this run; type {key}.lora.rank=0, or "
                    f"{cotrain}.enabled=true"
                )
        if self.policy.lora.learns and self.task == "train_meta_rm":
            raise ValueError(
                "policy.lora.rank: task=train_meta_rm trains all weights of a meta-RM; type policy.lora.rank=0"
            )

    def _check_scalar(self) -> None:
        """Check that the task knows scalar reward models."""
        for name in self.judging.scalar if self.task == "simulate" else ():
            raise ValueError(
                f"{key_of_judge(name)}.kind: task=simulate asks no scalar reward model, whose work is small compared "
                f"with a GRM's; type task=plan for its work, or {key_of_judge(name)}=rule to simulate the rest"
            )

    def _check_simulated(self) -> None:
        """Check that task=simulate knows the environment, the judge and the number of scores in a judgement."""
        if self.task != "simulate":
            return
        if not self.env.env_kind.is_single:
            raise ValueError(
                "env.kind: task=simulate knows only single turns; to see the rest of the run type env=single_turn"
            )
        for name, judge in self.judging.judges.items():
            key = key_of_judge(name)
            if judge.kind == "custom":
                raise ValueError(f"{key}.kind: task=simulate knows no judge of yours; to see the rest type {key}=rule")
            if not is_judge_simulated(judge):
                raise ValueError(
                    f"{key}.protocol: task=simulate doesn't know the number of scores in a {judge.protocol} "
                    "judgement; to see the rest of the run type judge=pointwise"
                )

    def _check_cotrain(self) -> None:
        """Check that GRMs that are trained are served here, sample their judgements, and are compared within groups."""
        for role in self.cotrains:
            if role not in self.grms:
                raise ValueError(
                    f"cotrains.{role}: there is no model {role!r}; known: {', '.join(self.grms) or 'none in grms'}; "
                    "the settings of the first one's learner are in cotrain"
                )
        for role in self.trained_grms:
            self._check_trained_grm(role)

    def _check_trained_grm(self, role: str) -> None:
        cotrain, key = self.trained_grms[role], key_of_cotrain(role)
        if role not in self.judging.local_roles:
            raise ValueError(
                f"{key}.enabled: there is no local GRM to train; type judge.kind=generative, with a "
                f"{key_of_model(role)}.path and a {key_of_model(role)}.engine other than openai"
            )
        if self.task == "simulate":
            raise ValueError(
                f"{key}.enabled: task=simulate simulates no flow of judging tasks; type task=plan for its work and "
                f"memory, or {key}.enabled=false to simulate the rest of the run"
            )
        judge = self.judge_training(role)
        if judge.protocol_kind.about == "pair" and cotrain.rollout_share > 0:
            raise ValueError(
                f"{key}.rollout_share: a judge of pairs can't learn from single rollouts; type {key}.rollout_share=0, "
                f"and give rankings as {key}.data_path"
            )
        if not judge.temperature > 0:
            raise ValueError(f"{key}.enabled: greedy judgements are all alike; type judge.temperature=1")
        if self.algorithm.estimator_kind.need == "batch":
            raise ValueError(
                f"algorithm.estimator: {self.algorithm.estimator} compares over a whole batch, and its groups may be "
                f"judged by different versions of a GRM that learns; with {key}.enabled type algorithm.estimator=grpo"
            )

    def _check_critic(self) -> None:
        """Check that a critic is trained next to a policy that is played and judged, by a judge that doesn't change."""
        if not self.critic.enabled:
            return
        if self.task in ("train_judge_rft", "train_meta_rm"):
            raise ValueError(
                f"critic.enabled: task={self.task} uses no critic; type critic=none algorithm.estimator=grpo"
            )
        for role in self.trained_grms:
            raise ValueError(
                "critic.enabled: a critic learns the scale of one judge, and a GRM that learns changes it; "
                f"type critic=none algorithm.estimator=grpo, or {key_of_cotrain(role)}.enabled=false"
            )
        if self.data.retrain_from is not None:
            raise ValueError(
                "critic.enabled: data.retrain_from trains only the policy; type critic=none algorithm.estimator=grpo"
            )

    @property
    def all_judges(self) -> dict[str, JudgeConfig]:
        """Name -> judge, including those that the reward doesn't use."""
        return {JUDGE: self.judge, **self.judges}

    def with_judge(self, name: str, judge: JudgeConfig) -> RunConfig:
        """The configuration with another judge in the place of one."""
        if name == JUDGE:
            return dataclasses.replace(self, judge=judge)
        return dataclasses.replace(self, judges={**self.judges, name: judge})

    @functools.cached_property
    def judging(self) -> Judging:
        """The judges that the reward uses, and the models that they may ask."""
        known = self.all_judges
        return Judging({name: known[name] for name in judges_of(self.reward, self.rewards)}, self.models)

    @property
    def judged_by_model(self) -> bool:
        """Whether a language model judges, here or remote."""
        return bool(self.judging.generative)

    @property
    def models(self) -> dict[str, ModelConfig]:
        """Role -> model, for every model that engines may serve."""
        return {POLICY: self.policy, GRM: self.grm, **self.grms}

    @property
    def served(self) -> tuple[str, ...]:
        """Roles that engines serve in this run, here or remote."""
        return (POLICY, *self.judging.roles)

    @property
    def learners(self) -> dict[str, str]:
        """Role whose weights are trained -> role that trains it."""
        return {POLICY: "learner"} | {role: role + LEARNER for role in self.trained_grms}

    def judge_training(self, role: str) -> JudgeConfig:
        """The judge whose prompts, limits and temperature a GRM in training learns under."""
        return self.judging.judges[self.judging.first_asking(role)]

    @property
    def trained_grms(self) -> dict[str, CotrainConfig]:
        """Role -> settings of its learner, for the GRMs that are trained next to the policy."""
        return {role: cotrain for role, cotrain in {GRM: self.cotrain, **self.cotrains}.items() if cotrain.enabled}

    def engine_kind_of(self, role: str) -> type[AnyEngine]:
        return self.judging.engine_kind_of(role)

    @property
    def uses_meta_rm(self) -> bool:
        """Whether the vote uses a meta-RM. One in training weights no vote."""
        weights_no_vote = self.task == "train_meta_rm" or self.data.retrain_from is not None
        return bool(self.judging.weighted) and not weights_no_vote

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that need a place."""
        if self.data.retrain_from is not None:
            return ("learner",)
        asks_critic = self.critic.enabled and self.task != "evaluate"
        learners = tuple(learner for role, learner in self.learners.items() if role != POLICY)
        more = ("meta_rm",) * self.uses_meta_rm + ("critic",) * asks_critic
        judging = (*self.judging.local_roles, *self.judging.scorer_roles)
        return (POLICY, "learner", *judging, *learners, *more)


def is_judge_simulated(judge: JudgeConfig) -> bool:
    """Whether a simulation knows the judge, and the number of scores in a judgement."""
    return judge.kind in ("rule", "label") or (judge.kind == "generative" and judge.protocol_kind.scores == "responses")


def roles_with(grms: Collection[str]) -> tuple[str, ...]:
    """The roles that a placement may seat, in a run with these further models."""
    return (*ROLES, *(name for role in grms for name in (role, role + LEARNER)))
