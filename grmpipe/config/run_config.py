"""RunConfig: everything a user can set, by section, with the checks across sections. Starts nothing."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

from grmpipe.config.capacity import PlanConfig, SimulateConfig
from grmpipe.config.cotrain import CotrainConfig
from grmpipe.config.critic import CriticConfig, check_critic
from grmpipe.config.data import DataConfig, RolloutConfig
from grmpipe.config.engine_kinds import engine_kind, engines_that
from grmpipe.config.env import EnvConfig
from grmpipe.config.evaluation import EvaluateConfig, MetaRmConfig, RftConfig
from grmpipe.config.judge import JudgeConfig, LabelConfig
from grmpipe.config.judge_monitor import JudgeMonitorConfig
from grmpipe.config.judge_tables import VOTES_WITH_META_RM
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
ROLES = ("policy", "learner", "grm", "grm_learner", "meta_rm", "critic")  # roles that a placement may seat
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
    meta_rm: MetaRmConfig = field(default_factory=MetaRmConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    labels: LabelConfig = field(default_factory=LabelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    cotrain: CotrainConfig = field(default_factory=CotrainConfig)
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
        check_spread(self.algorithm, self.judge.num_judgements)
        check_critic(self.critic, self.algorithm, self.train)
        self._check_engines()
        for role in self.placement.roles:
            if role not in ROLES:
                raise ValueError(f"placement.roles.{role}: there is no such role; known: {', '.join(ROLES)}")
        self._check_replay()
        self._check_cotrain()
        self._check_critic()
        self._check_lora()
        self._check_meta()
        self._check_simulated()
        if self.judge.kind == "label" or self.cotrain.enabled:
            self._check_labels()
        if self.task == "train_judge_rft" and self.judge.kind != "label":
            raise ValueError(
                "task: train_judge_rft learns from labelled judgements; type judge=label data.path=... as well"
            )

    def _check_engines(self) -> None:
        """Check that the policy's engines take weights, and that the judge's engines can do what the judge asks."""
        policy, grm = (self.engine_kind_of(role) for role in ("policy", "grm"))
        if not policy.transports:
            able = " or ".join(engines_that(lambda kind: bool(kind.transports)))
            raise ValueError(
                f"policy.engine: {self.policy.engine} can't receive weights or return log-probs, so it can't serve a "
                f"model in training; type policy.engine={able}"
            )
        if self.judge_is_remote and self.grm.path.startswith("tiny://"):
            raise ValueError(
                f"grm.path: {self.grm.path} is a shipped tiny model; with grm.engine={self.grm.engine} type the "
                "model's name at the endpoint, as in grm.path=gpt-4.1-mini"
            )
        if self.judge.structured and self.judged_by_model and not grm.grammar:
            able = " or ".join(engines_that(lambda kind: kind.grammar))
            raise ValueError(
                f"judge.structured: {self.grm.engine} can't constrain a judgement by a grammar; "
                f"type judge.structured=false, or grm.engine={able}"
            )

    def _choose_by_device(self) -> None:
        """Replace `auto` and null by values for the device of each role: no other code asks for the device again."""
        chosen: dict[str, object] = {
            role: dataclasses.replace(model, dtype=BY_DEVICE[self.on_gpu(role)])
            for role, model in self.models.items()
            if model.dtype == AUTO
        }
        train, on_gpu = self.train, self.on_gpu("learner")
        if train.dtype == AUTO:
            train = dataclasses.replace(train, dtype=BY_DEVICE[on_gpu])
        if train.activation_checkpointing is None:
            train = dataclasses.replace(train, activation_checkpointing=on_gpu)
        for name, section in (chosen | {"train": train}).items():
            object.__setattr__(self, name, section)

    def on_gpu(self, role: str) -> bool:
        """Whether the role's place has GPUs. A role without a place counts as on cores."""
        where = self.placement.roles.get(role)
        pool = self.placement.pools.get(where.pool) if where is not None else None
        return pool is not None and pool.resource == "gpu"

    def _check_labels(self) -> None:
        low, high = self.judge.score_min, self.judge.score_max
        if not low < self.labels.pass_score <= high:
            raise ValueError(
                f"labels.pass_score: must be above judge.score_min = {low} and at most judge.score_max = {high}, "
                f"got {self.labels.pass_score}"
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
        if self.cotrain.enabled:
            raise ValueError(f"cotrain.enabled: {alone}; type cotrain.enabled=false")
        if self.critic.enabled:
            raise ValueError(f"critic.enabled: {alone}; type critic=none algorithm.estimator=grpo")

    def _check_meta(self) -> None:
        """Check that a vote that needs a meta-RM has one, with something to read."""
        if not self.uses_meta_rm:
            return
        if self.task in ("plan", "simulate"):
            raise ValueError(
                f"judge.vote: task={self.task} doesn't model a meta-RM, whose work is small compared with the GRM's; "
                "to see the rest of the run type judge.vote=mean"
            )
        if self.judge_is_remote:
            raise ValueError(
                f"judge.vote: {self.judge.vote} needs a meta-RM, which reads the judge's tokens, and an endpoint "
                "returns none; type judge.vote=mean"
            )
        if self.meta_rm.path is None:
            raise ValueError(
                f"meta_rm.path: judge.vote={self.judge.vote} needs a meta-RM, and there is none; train one by "
                "+experiment=train_meta_rm and type meta_rm.path=<its run_dir>/meta_rm, or judge.vote=mean"
            )

    def _check_lora(self) -> None:
        """Check that adapters belong to a model that learns and go to an engine that applies them."""
        for role, model in self.models.items():
            if model.lora.in_engines and not self.engine_kind_of(role).applies_adapters:
                able = " or ".join(engines_that(lambda kind: kind.applies_adapters))
                raise ValueError(
                    f"{role}.lora.sync: {model.engine} can't receive adapters alone; type {role}.lora.sync=merged, "
                    f"or {role}.engine={able}"
                )
        # If the policy is the judge itself, it takes its settings from the GRM's.
        if self.grm.lora.learns and not (self.cotrain.enabled or self.judge.kind == "label"):
            raise ValueError(
                "grm.lora.rank: the GRM doesn't learn in this run; type grm.lora.rank=0, or cotrain.enabled=true"
            )
        if self.policy.lora.learns and self.task == "train_meta_rm":
            raise ValueError(
                "policy.lora.rank: task=train_meta_rm trains all weights of a meta-RM; type policy.lora.rank=0"
            )

    def _check_simulated(self) -> None:
        """Check that task=simulate knows the environment, the judge and the number of scores in a judgement."""
        if self.task != "simulate":
            return
        if self.env.is_custom:
            raise ValueError("env.kind: task=simulate knows no env of yours; to see the rest type env=single_turn")
        if self.judge.kind == "custom":
            raise ValueError("judge.kind: task=simulate knows no judge of yours; to see the rest type judge=rule")
        if self.judged_by_model and self.judge.protocol_kind.scores != "responses":
            raise ValueError(
                f"judge.protocol: task=simulate doesn't know the number of scores in a {self.judge.protocol} "
                "judgement; to see the rest of the run type judge=pointwise"
            )

    def _check_cotrain(self) -> None:
        """Check that a GRM that is trained is served here, samples its judgements, and is compared within groups."""
        if not self.cotrain.enabled:
            return
        if not self.judged_by_model or self.judge_is_remote:
            raise ValueError(
                "cotrain.enabled: there is no local GRM to train; type judge.kind=generative (or mixed), with a "
                "grm.path and a grm.engine other than openai"
            )
        if self.task in ("plan", "simulate"):
            raise ValueError(
                f"cotrain.enabled: task={self.task} models only one learner; to see the rest of the run type "
                "cotrain.enabled=false"
            )
        if self.judge.protocol_kind.about == "pair" and self.cotrain.rollout_share > 0:
            raise ValueError(
                "cotrain.rollout_share: a judge of pairs can't learn from single rollouts; type "
                "cotrain.rollout_share=0, and "
                "give rankings as cotrain.data_path"
            )
        if not self.judge.temperature > 0:
            raise ValueError("cotrain.enabled: greedy judgements are all alike; type judge.temperature=1")
        if self.algorithm.estimator_kind.need == "batch":
            raise ValueError(
                f"algorithm.estimator: {self.algorithm.estimator} compares over a whole batch, and its groups may be "
                "judged by different versions of a GRM that learns; with cotrain.enabled type algorithm.estimator=grpo"
            )

    def _check_critic(self) -> None:
        """Check that a critic is trained next to a policy that is played and judged, by a judge that doesn't change."""
        if not self.critic.enabled:
            return
        if self.task in ("train_judge_rft", "train_meta_rm"):
            raise ValueError(
                f"critic.enabled: task={self.task} uses no critic; type critic=none algorithm.estimator=grpo"
            )
        if self.cotrain.enabled:
            raise ValueError(
                "critic.enabled: a critic learns the scale of one judge, and a GRM that learns changes it; "
                "type critic=none algorithm.estimator=grpo, or cotrain.enabled=false"
            )
        if self.data.retrain_from is not None:
            raise ValueError(
                "critic.enabled: data.retrain_from trains only the policy; type critic=none algorithm.estimator=grpo"
            )

    @property
    def judged_by_model(self) -> bool:
        """Whether there is a GRM, here or remote."""
        return self.judge.kind == "generative" or (self.judge.kind == "mixed" and "generative" in self.judge.mix)

    @property
    def judge_is_remote(self) -> bool:
        """Whether the GRM is behind an endpoint. It then needs no place and no files."""
        return self.judged_by_model and self.engine_kind_of("grm").outside

    @property
    def models(self) -> dict[str, ModelConfig]:
        """Role -> model, for every model that engines may serve."""
        return {"policy": self.policy, "grm": self.grm}

    @property
    def served(self) -> tuple[str, ...]:
        """Roles that engines serve in this run, here or remote."""
        return ("policy", "grm") if self.judged_by_model else ("policy",)

    @property
    def learners(self) -> dict[str, str]:
        """Role whose weights are trained -> role that trains it."""
        return {"policy": "learner"} | ({"grm": "grm_learner"} if self.cotrain.enabled else {})

    def engine_kind_of(self, role: str) -> type[AnyEngine]:
        return engine_kind(self.models[role].engine, f"{role}.engine")

    @property
    def uses_meta_rm(self) -> bool:
        """Whether the vote uses a meta-RM. One in training weights no vote."""
        nobody = self.task == "train_meta_rm" or self.data.retrain_from is not None
        return self.judged_by_model and self.judge.vote in VOTES_WITH_META_RM and not nobody

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that need a place."""
        if self.data.retrain_from is not None:
            return ("learner",)
        seated = self.judged_by_model and not self.judge_is_remote
        roles = ("policy", "learner", "grm") if seated else ("policy", "learner")
        asks_critic = self.critic.enabled and self.task != "evaluate"
        more = {"grm_learner": self.cotrain.enabled, "meta_rm": self.uses_meta_rm, "critic": asks_critic}
        return (*roles, *(role for role, needed in more.items() if needed))
