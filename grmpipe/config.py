"""RunConfig: everything a user can set, by section. The only room that knows OmegaConf; it starts nothing."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import itertools
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from grmpipe.cotrain.settings import CotrainConfig
from grmpipe.data.settings import DataConfig
from grmpipe.evaluation.settings import EvaluateConfig
from grmpipe.finetune.settings import FinetuneConfig
from grmpipe.judge.label_settings import LabelConfig
from grmpipe.judge.settings import VOTES_WITH_META, JudgeConfig
from grmpipe.judge.watch_settings import WatchConfig
from grmpipe.meta.settings import MetaConfig
from grmpipe.observe.settings import TrackingConfig
from grmpipe.plan.settings import PlanConfig
from grmpipe.rollout.settings import RolloutConfig
from grmpipe.simulation.settings import SimulateConfig
from grmpipe.train.critic_settings import CriticConfig, check_critic
from grmpipe.train.settings import AlgorithmConfig, TrainConfig, check_pass_k, check_replay, check_spread
from models.settings import ENGINES_OF_THE_POLICY, ENGINES_WITH_GRAMMAR, EngineConfig, ModelConfig
from scheduler.balance import BalanceConfig
from scheduler.health import HealthConfig
from scheduler.placement import ClusterConfig, PlacementConfig
from scheduler.weight_sync import SyncConfig

TASKS = ("train", "finetune", "train_meta", "evaluate", "plan", "simulate", "report", "doctor")
RESUMES = ("never", "auto")
ENVS = ("single_turn",)
ESTIMATORS_OF_A_BATCH = ("reinforce_pp", "reinforce_pp_baseline", "gae")
# What may differ between a run and its resumption: none of it changes what is trained. Who samples may change, too:
# every token brings its log-prob and its version along.
FREE_ON_RESUME = (
    "task", "resume", "run_dir", "objective", "tracking", "cluster", "placement", "sync", "health", "balance", "plan",
    "simulate", "evaluate", "watch",
    "engine", "policy.engine", "policy.engine_options", "policy.lora.sync", "grm.engine", "grm.engine_options",
    "grm.lora.sync",
)  # fmt: skip
# But not, of engines, what decides which prompts fit, or may make another model of the same files.
ENGINE_KEYS = ("engine.", "policy.engine_options.", "grm.engine_options.")
BOUND_ON_RESUME = ("max_context_tokens", "options", "extra_body")


class ConfigError(ValueError):
    """A bad configuration, in words a user can act on. Exit code 2."""


@dataclass(frozen=True)
class EnvConfig:
    """What the policy acts in."""

    kind: str = "single_turn"

    def __post_init__(self) -> None:
        if self.kind not in ENVS:
            raise ValueError(f"kind: unknown env {self.kind!r}; known: {', '.join(ENVS)}")


@dataclass(frozen=True)
class RunConfig:
    """One run. Sections are owned, and checked, by the rooms they configure."""

    task: str = "train"
    experiment: str = "default"
    seed: int = 0
    run_dir: str | None = None  # default: runs/<experiment>/<date>_<time>
    resume: str = "never"  # auto: go on from the run's last checkpoint
    objective: str = "eval.final.grm_score"  # a path into summary.json; what a sweep maximises
    policy: ModelConfig = field(default_factory=ModelConfig)
    grm: ModelConfig = field(default_factory=lambda: ModelConfig(path="tiny://grm"))
    meta: MetaConfig = field(default_factory=MetaConfig)
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
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task: unknown task {self.task!r}; known: {', '.join(TASKS)}")
        if self.resume not in RESUMES:
            raise ValueError(f"resume: unknown value {self.resume!r}; known: {', '.join(RESUMES)}")
        if not re.fullmatch(r"[\w.-]+", self.experiment):
            raise ValueError(f"experiment: may hold letters, digits, '_', '.' and '-', got {self.experiment!r}")
        check_pass_k(self.algorithm, self.train.group_size)
        check_replay(self.algorithm, self.train.max_staleness)
        check_spread(self.algorithm, self.judge.num_judgements)
        check_critic(self.critic, self.algorithm, self.train)
        if self.policy.engine not in ENGINES_OF_THE_POLICY:
            raise ValueError(
                f"policy.engine: {self.policy.engine} takes no weights and gives no log-probs, so it can't serve a "
                f"model in training; type policy.engine={' or '.join(ENGINES_OF_THE_POLICY)}"
            )
        if self.judge_is_outside and self.grm.path.startswith("tiny://"):
            raise ValueError(
                f"grm.path: {self.grm.path} is a model of this project; with grm.engine=openai type the model's name "
                "at engine.openai.base_url, as in grm.path=gpt-4.1-mini"
            )
        if self.judge.structured and self.judged_by_model and self.grm.engine not in ENGINES_WITH_GRAMMAR:
            raise ValueError(
                f"judge.structured: {self.grm.engine} can't hold a judgement to a form; "
                f"type judge.structured=false, or grm.engine={' or '.join(ENGINES_WITH_GRAMMAR)}"
            )

        self._check_replay()
        self._check_cotrain()
        self._check_critic()
        self._check_lora()
        self._check_meta()
        self._check_simulated()
        if self.judge.kind == "label" or self.cotrain.enabled:
            self._check_labels()
        if self.task == "finetune" and self.judge.kind != "label":
            raise ValueError("task: finetune learns from labelled judgements; type judge=label data.path=... as well")

    def _check_labels(self) -> None:
        low, high = self.judge.score_min, self.judge.score_max
        if not low < self.labels.pass_score <= high:
            raise ValueError(
                f"labels.pass_score: must be above judge.score_min = {low} and at most judge.score_max = {high}, "
                f"got {self.labels.pass_score}"
            )

    def _check_replay(self) -> None:
        """Only the learner is there to work."""
        if self.data.replay is None:
            return
        if self.task != "train":
            raise ValueError(f"data.replay: task={self.task} replays nothing; type task=train, or data.replay=null")
        alone = "data.replay trains the policy alone"
        if self.cotrain.enabled:
            raise ValueError(f"cotrain.enabled: {alone}; type cotrain.enabled=false")
        if self.critic.enabled:
            raise ValueError(f"critic.enabled: {alone}; type critic=none algorithm.estimator=grpo")

    def _check_meta(self) -> None:
        """A vote that asks a meta-RM has one, and something for it to read."""
        if not self.guided_by_meta:
            return
        if self.task in ("plan", "simulate"):
            raise ValueError(
                f"judge.vote: task={self.task} knows no meta-RM, whose work is small beside the GRM's; to see the rest "
                "of the run type judge.vote=mean"
            )
        if self.judge_is_outside:
            raise ValueError(
                f"judge.vote: {self.judge.vote} asks a meta-RM, which reads the judge's tokens, and an endpoint shows "
                "none; type judge.vote=mean"
            )
        if self.meta.path is None:
            raise ValueError(
                f"meta.path: judge.vote={self.judge.vote} asks a meta-RM, and there is none; train one by "
                "+experiment=train_meta_rm and type meta.path=<its run_dir>/meta, or judge.vote=mean"
            )

    def _check_lora(self) -> None:
        """Adapters go to who applies them, and are of a model that learns."""
        for role, model in (("policy", self.policy), ("grm", self.grm)):
            if model.lora.in_engines and model.engine != "embedded":
                raise ValueError(
                    f"{role}.lora.sync: {model.engine} gets no adapters by themselves; type {role}.lora.sync=merged, "
                    f"or {role}.engine=embedded"
                )
        # Where the judge itself is the policy, its settings are taken from those of the GRM.
        if self.grm.lora.learns and not (self.cotrain.enabled or self.judge.kind == "label"):
            raise ValueError(
                "grm.lora.rank: the GRM doesn't learn in this run; type grm.lora.rank=0, or cotrain.enabled=true"
            )
        if self.policy.lora.learns and self.task == "train_meta":
            raise ValueError("policy.lora.rank: task=train_meta trains a meta-RM, whole; type policy.lora.rank=0")

    def _check_simulated(self) -> None:
        """A scripted GRM must know how many scores are wanted of it."""
        if self.task != "simulate":
            return
        if self.judge.kind == "own":
            raise ValueError("judge.kind: task=simulate knows no judge of yours; to see the rest type judge=rule")
        if self.judged_by_model and self.judge.protocol in ("rubric", "steps"):
            raise ValueError(
                f"judge.protocol: task=simulate doesn't know how many scores a judgement by {self.judge.protocol} has; "
                "to see the rest of the run type judge=pointwise"
            )

    def _check_cotrain(self) -> None:
        """A GRM that learns is here, draws its judgements, and is compared within groups."""
        if not self.cotrain.enabled:
            return
        if not self.judged_by_model or self.judge_is_outside:
            raise ValueError(
                "cotrain.enabled: there is no GRM of ours to train: judge.kind=generative (or mixed) with a grm.path "
                "and an engine here has one"
            )
        if self.task in ("plan", "simulate"):
            raise ValueError(
                f"cotrain.enabled: task={self.task} knows one learner only; to see the rest of the run type "
                "cotrain.enabled=false"
            )
        if self.judge.protocol == "pairwise" and self.cotrain.own_share > 0:
            raise ValueError(
                "cotrain.own_share: a judge of pairs can't learn from single rollouts; type cotrain.own_share=0, and "
                "give rankings as cotrain.data_path"
            )
        if not self.judge.temperature > 0:
            raise ValueError("cotrain.enabled: greedy judgements are all alike; type judge.temperature=1")
        if self.algorithm.estimator in ESTIMATORS_OF_A_BATCH:
            raise ValueError(
                f"algorithm.estimator: {self.algorithm.estimator} compares over a whole batch, whose groups may be "
                "judged by different versions of a GRM that learns; with cotrain.enabled type algorithm.estimator=grpo"
            )

    def _check_critic(self) -> None:
        """It learns beside a policy that is played and judged, by a judge that stays as it is."""
        if not self.critic.enabled:
            return
        if self.task in ("finetune", "train_meta"):
            raise ValueError(
                f"critic.enabled: task={self.task} asks no critic; type critic=none algorithm.estimator=grpo"
            )
        if self.cotrain.enabled:
            raise ValueError(
                "critic.enabled: what a critic expects is by the scale of one judge, and a GRM that learns moves it; "
                "type critic=none algorithm.estimator=grpo, or cotrain.enabled=false"
            )
        if self.data.replay is not None:
            raise ValueError(
                "critic.enabled: data.replay trains the policy alone; type critic=none algorithm.estimator=grpo"
            )

    @property
    def judged_by_model(self) -> bool:
        """Is there a GRM, here or outside?"""
        return self.judge.kind == "generative" or (self.judge.kind == "mixed" and "generative" in self.judge.mix)

    @property
    def judge_is_outside(self) -> bool:
        """Does the GRM live behind somebody else's endpoint? It takes no place then, and no files."""
        return self.judged_by_model and self.grm.engine == "openai"

    @property
    def guided_by_meta(self) -> bool:
        """Does the vote ask a meta-RM? One in training guides nobody."""
        nobody = self.task == "train_meta" or self.data.replay is not None
        return self.judged_by_model and self.judge.vote in VOTES_WITH_META and not nobody

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that need a place."""
        if self.data.replay is not None:
            return ("learner",)
        seated = self.judged_by_model and not self.judge_is_outside
        roles = ("policy", "learner", "grm") if seated else ("policy", "learner")
        asks_critic = self.critic.enabled and self.task != "evaluate"
        more = {"grm_learner": self.cotrain.enabled, "meta": self.guided_by_meta, "critic": asks_critic}
        return (*roles, *(role for role, needed in more.items() if needed))


Config = TypeVar("Config")


def schema() -> object:
    """A mutable twin of RunConfig for Hydra to merge YAML and overrides into, typed key by key."""
    return _thawed(RunConfig)


def build(config: DictConfig) -> RunConfig:
    """The checked configuration. Raises ConfigError naming the key."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return from_values(RunConfig, typing.cast(Mapping[str, object], values))


def from_values(cls: type[Config], values: Mapping[str, object], path: str = "") -> Config:
    """A (nested) frozen dataclass from plain values. An error of a section's own check gets the section's key."""
    hints = typing.get_type_hints(cls)
    known = {spec.name for spec in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(unknown_key(f"{path}{name}", [f"{path}{other}" for other in known]))
    built = {name: _value(hints[name], value, f"{path}{name}") for name, value in values.items()}
    try:
        return cls(**built)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}{error}") from error


def overlaid(section: Config, values: Mapping[str, object], path: str) -> Config:
    """A section with some of its values replaced, typed and checked as if they had been set there."""
    known = [spec.name for spec in dataclasses.fields(section)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(unknown_key(f"{path}{name}", [f"{path}{other}" for other in known]))
    try:
        typed = OmegaConf.merge(OmegaConf.structured(_thawed(type(section))), dataclasses.asdict(section), values)  # type: ignore[call-overload]
        plain = OmegaConf.to_container(typed)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}{error.full_key}: {str(error).splitlines()[0]}") from error
    return from_values(type(section), typing.cast(Mapping[str, object], plain), path)


def to_yaml(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def placement_yaml(placement: PlacementConfig) -> str:
    """The `placement` block alone, as a file of conf/placement/ has it."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(placement)))


def read_yaml(path: Path) -> RunConfig:
    """A run's own config.yaml."""
    try:
        return build(typing.cast(DictConfig, OmegaConf.load(path)))
    except (ConfigError, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{path} can't be read: {str(error).splitlines()[0]}") from error


def changed_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """Keys that differ and may not between a run and its resumption, as `key: old -> new`."""
    before, after = (dict(_leaves(dataclasses.asdict(config))) for config in (old, new))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not free_on_resume(key)
    ]


def free_on_resume(key: str) -> bool:
    names = key.split(".")
    under = any(names[: len(free)] == free for free in (section.split(".") for section in FREE_ON_RESUME))
    return under and not (key.startswith(ENGINE_KEYS) and any(name in BOUND_ON_RESUME for name in names))


def known_keys() -> list[str]:
    """Every key with a fixed name, sections included."""
    return [key for key, _ in _keys(RunConfig)]


def unknown_key(key: str, known: list[str]) -> str:
    """The message for a key that doesn't exist, with the nearest ones that do."""
    # The right leaf in the wrong section is the commonest slip of all.
    same_leaf = [other for other in known if other.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    hints = same_leaf[:3] or difflib.get_close_matches(key, known, n=2, cutoff=0.5)
    return f"unknown key {key!r}" + (f"; did you mean {' or '.join(hints)}?" if hints else "")


def not_there_yet(key: str) -> str:
    """What to type for a key of a section whose keys are the user's own; empty for any other."""
    for section, hint in _keys(RunConfig):
        of_values = typing.get_origin(hint) is dict and not dataclasses.is_dataclass(typing.get_args(hint)[1])
        if of_values and (key == section or key.startswith(f"{section}.")):
            return f"{key}: {section} doesn't hold it yet; to add it type +{key}=..."
    return ""


def no_such_member(key: str) -> str:
    """The message for a member that a section of named sections doesn't have; empty for any other key."""
    section, _, name = key.rpartition(".")
    hint = dict(_keys(RunConfig)).get(section)
    if typing.get_origin(hint) is not dict or not dataclasses.is_dataclass(typing.get_args(hint)[1]):
        return ""
    return f"{key}: {section} has no {name} yet; to add one type '+{section}={{{name}: {{...}}}}'"


def explain(error: Exception) -> str:
    """One readable message for what Hydra or OmegaConf found wrong while composing."""
    text = f"{error}\n{error.__cause__ or ''}"
    found = re.search(r"Could not override '([^']+)'", text) or re.search(r"full_key: (\S+)", text)
    noise = (
        "Error merging override",
        "Could not override",
        "full_key:",
        "reference_type=",
        "object_type=",
        "provider=",
    )
    said = [line.strip() for line in text.splitlines() if line.strip()]
    useful = list(dict.fromkeys(line for line in said if not line.startswith(noise)))
    # OmegaConf fills a member of a typed dictionary only together with the dictionary.
    if (added := re.search(r"Error merging override \+([^=]+)=", text)) and "is not a subclass of" in text:
        parents = itertools.accumulate(added[1].split("."), lambda path, name: f"{path}.{name}")
        return next(filter(None, map(no_such_member, parents)), "") or f"{added[1]}: {useful[0]}"
    if found and ("not in" in text or "Key '" in text):
        missing = re.search(r"full_key: (\S+)", text)
        member = no_such_member(missing[1]) if missing else ""
        return member or not_there_yet(found[1]) or unknown_key(found[1], known_keys())
    return (f"{found[1]}: {useful[0]}" if found and useful else " ".join(useful or said)).removesuffix(
        " Config search path:"
    )


def _value(hint: object, value: object, path: str) -> object:
    """Rebuild dataclasses at any depth of dicts."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_values(hint, typing.cast(Mapping[str, object], value), f"{path}.")
    if typing.get_origin(hint) is dict:
        inner = typing.get_args(hint)[1]
        items = typing.cast(Mapping[str, object], value).items()
        return {key: _value(inner, item, f"{path}.{key}") for key, item in items}
    return value


def _thawed(cls: type) -> type:
    """OmegaConf makes frozen dataclasses read-only, also for the YAML that is to fill them."""
    hints = typing.get_type_hints(cls)
    fields = []
    for spec in dataclasses.fields(cls):
        hint, value = _thawed_hint(hints[spec.name]), _default(spec)
        if dataclasses.is_dataclass(value):
            fields.append((spec.name, hint, field(default_factory=functools.partial(_fill, hint, value))))
        else:
            fields.append((spec.name, hint, field(default_factory=functools.partial(copy.copy, value))))
    return dataclasses.make_dataclass(cls.__name__, fields)


def _default(spec: dataclasses.Field) -> object:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return MISSING if spec.default is dataclasses.MISSING else spec.default


def _fill(section: object, values: object) -> object:
    """A thawed section with its owner's defaults; its own sections fill themselves."""
    plain = {f.name: getattr(values, f.name) for f in dataclasses.fields(values)}  # type: ignore[arg-type]
    return section(**{k: v for k, v in plain.items() if not dataclasses.is_dataclass(v)})  # type: ignore[operator]


def _thawed_hint(hint: object) -> object:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _thawed(hint)
    if typing.get_origin(hint) is dict:
        key, value = typing.get_args(hint)
        return dict[key, _thawed_hint(value)]  # type: ignore[valid-type, misc]
    return hint


def _keys(cls: type, path: str = "") -> Iterator[tuple[str, object]]:
    hints = typing.get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        hint, key = hints[spec.name], f"{path}{spec.name}"
        yield key, hint
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _keys(hint, f"{key}.")


def _leaves(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
