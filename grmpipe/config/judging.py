"""Who judges a run: its judges by name, the models that they ask, and the checks between both. Starts nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from grmpipe.config.engine_kinds import engine_kind, engines_that
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.judge_tables import VOTES_WITH_META_RM
from models.engines.engine_kind import AnyEngine
from models.settings import ModelConfig

# Sections of the first judge, of the first model that judges, and of the model in training.
JUDGE, GRM, POLICY = "judge", "grm", "policy"
SHORT = {"models": GRM, "judges": JUDGE, "rewards": "reward"}  # section of further ones -> that of the first one
RESERVED = ("policy", "learner", "grm", "meta", "meta_rm", "critic", "env")
# A judge's accuracy is the metric <name>_accuracy, and a model's metrics are <name>/...: names that would make others.
METRICS = (
    "true", "alarm", "cascade", "driver", "engines", "eval", "experts", "groups", "judge_monitor", "memory",
    "mismatch", "moves", "perf", "prompt_length", "response_length", "reward", "rollout", "slots", "staleness",
    "stall", "sync", "time", "train",
)  # fmt: skip
LEARNER = "_learner"  # the end of the name of the role that trains a judging model


@dataclass(frozen=True, slots=True)
class Judging:
    """The judges whose verdicts make the reward, and the models that judges may ask.

    judges: name -> settings, of those that the reward uses, in its order.
    models: role -> settings, of every model that judges may ask, including those that none asks.
    """

    judges: Mapping[str, JudgeConfig]
    models: Mapping[str, ModelConfig]

    @property
    def first(self) -> str:
        """The name of the first judge."""
        return first_of(self.judges)

    @property
    def by_model(self) -> bool:
        """Whether a language model or a scalar reward model judges."""
        return bool(self.generative or self.scalar)

    @property
    def compares(self) -> bool:
        """Whether a generative judge sees several responses next to each other."""
        return any(judge.protocol_kind.compares for judge in self.generative.values())

    @property
    def generative(self) -> dict[str, JudgeConfig]:
        """The judges that ask a language model."""
        return {name: judge for name, judge in self.judges.items() if judge.kind == "generative"}

    @property
    def scalar(self) -> dict[str, JudgeConfig]:
        """The judges that ask a scalar reward model."""
        return {name: judge for name, judge in self.judges.items() if judge.kind == "scalar"}

    @property
    def scalar_roles(self) -> tuple[str, ...]:
        """The scalar reward models that judges ask, here or remote."""
        asked = {judge.model for judge in self.scalar.values()}
        return tuple(role for role in self.models if role in asked)

    @property
    def scorer_roles(self) -> tuple[str, ...]:
        """Those of them that need a place and files: their processes are scorers."""
        return tuple(role for role in self.scalar_roles if not self.engine_kind_of(role).outside)

    @property
    def asked_roles(self) -> tuple[str, ...]:
        """All models that judges ask and that aren't the policy."""
        return (*self.roles, *self.scalar_roles)

    @property
    def roles(self) -> tuple[str, ...]:
        """The models with engines of their own that judges ask, here or remote."""
        asked = {judge.model for judge in self.generative.values()}
        return tuple(role for role in self.models if role in asked and role != POLICY)

    @property
    def local_roles(self) -> tuple[str, ...]:
        """Those of them that need a place and files."""
        return tuple(role for role in self.roles if not self.engine_kind_of(role).outside)

    @property
    def remote_roles(self) -> tuple[str, ...]:
        """Those of them that are behind an endpoint."""
        return tuple(role for role in self.roles if self.engine_kind_of(role).outside)

    @property
    def by_policy(self) -> bool:
        """Whether the policy judges its own rollouts (self-rewarding, arXiv 2401.10020)."""
        return bool(self.asking(POLICY))

    @property
    def max_concurrency(self) -> int:
        """Most judge tasks in flight."""
        return sum(judge.max_concurrency for judge in self.judges.values())

    @property
    def weighted(self) -> dict[str, JudgeConfig]:
        """The judges whose votes a meta-RM weights."""
        return {name: judge for name, judge in self.generative.items() if judge.vote in VOTES_WITH_META_RM}

    def engine_kind_of(self, role: str) -> type[AnyEngine]:
        return engine_kind(self.models[role].engine, f"{key_of_model(role)}.engine")

    def asking(self, role: str) -> dict[str, JudgeConfig]:
        """The judges that ask a model."""
        return {name: judge for name, judge in self.generative.items() if judge.model == role}

    def first_asking(self, role: str) -> str:
        """The name of the judge whose prompts, limits and temperature a model in training learns under."""
        return next(iter(self.asking(role)))


def first_of(judges: Collection[str]) -> str:
    """The first of the judges that a reward uses: `judge`, or the only one. Its scale is that of the labels, and of the
    scores of all together.
    """
    return next(iter(judges)) if len(judges) == 1 else JUDGE


def key_of_judge(name: str) -> str:
    """The configuration's section of a judge."""
    return name if name == JUDGE else f"judges.{name}"


def key_of_model(role: str) -> str:
    """The configuration's section of a model."""
    return role if role in (POLICY, GRM) else f"models.{role}"


def key_of_parallel(learner: str) -> str:
    """The configuration's section for how the ranks of a role that trains a model share it."""
    own = {"learner": "train", "critic": "critic"}
    return f"{own.get(learner) or f'{key_of_model(learner.removesuffix(LEARNER))}.train'}.parallel"


def first_apart(section: str, key: str, value: str = "<value>") -> str:
    """The error of a first judge, model or composition that is typed as if it were a further one."""
    first = SHORT[section]
    rest = key.partition(".")[2] or "<key>"
    return f"{section}.{first}: the first one has a section of its own; type {first}.{rest}={value}"


def check_names(section: str, names: Collection[str]) -> None:
    """Check the names of further judges or models: they are part of keys, of metrics, and of names of processes."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z]\w*", name):
            raise ValueError(f"{section}.{name}: a name has letters, digits and '_', and begins with a letter")
        if SHORT[section] == name:
            raise ValueError(first_apart(section, name))
        if name in (JUDGE, *RESERVED, *METRICS) or name.endswith(LEARNER):
            raise ValueError(
                f"{section}.{name}: the name is taken, by a role or by metrics of a run; choose another one, that "
                f"doesn't end in {LEARNER}"
            )


def check_all_used(judging: Judging, judges: Collection[str], models: Collection[str]) -> None:
    """Check that no judge or model was configured in vain: the run would be trained without it."""
    for name in judges:
        if name not in judging.judges:
            raise ValueError(
                f"judges.{name}: the reward doesn't use it; type reward=mix 'reward.mix={{judge: 0.5, {name}: 0.5}}', "
                f"or reward.judge={name}"
            )
    for role in models:
        if role not in judging.asked_roles:
            raise ValueError(f"models.{role}: no judge of this run asks it; type judges.<name>.model={role}")


def check_judging(judging: Judging) -> None:
    """Check that each judge's model exists, and can do what the judge asks."""
    for name, judge in (judging.generative | judging.scalar).items():
        if judge.model not in judging.models:
            added = judge.model.rpartition(".")[2]
            raise ValueError(
                f"{key_of_judge(name)}.model: there is no model {judge.model!r}; type one of "
                f"{', '.join(judging.models)}"
                + (f", or add it by +grm@models.{added}=path" * (added not in judging.models))
            )
    check_scalar(judging)
    for name, judge in judging.generative.items():
        check_engine(name, judge, judging)
    for role in (role for role in judging.asked_roles if judging.engine_kind_of(role).outside):
        model, key = judging.models[role], key_of_model(role)
        if model.path.startswith("tiny://"):
            raise ValueError(
                f"{key}.path: {model.path} is a shipped tiny model; with {key}.engine={model.engine} type the model's "
                f"name at the endpoint, as in {key}.path=gpt-4.1-mini"
            )


def check_scalar(judging: Judging) -> None:
    """Check that a scalar reward model is neither the policy nor a language model of another judge."""
    for name, judge in judging.scalar.items():
        if judge.model == POLICY or judge.model in judging.roles:
            raise ValueError(
                f"{key_of_judge(name)}.model: {judge.model} is a language model, and a scalar judge asks a reward "
                f"model of its own; add one by +grm@models.reward_model=path models.reward_model.path=<model>, and "
                f"type {key_of_judge(name)}.model=reward_model"
            )


def check_engine(name: str, judge: JudgeConfig, judging: Judging) -> None:
    """Check that the engine of a judge's model can do what the judge asks."""
    key, engine, called = key_of_judge(name), judging.engine_kind_of(judge.model), judging.models[judge.model].engine
    if judge.structured and not engine.grammar:
        able = " or ".join(engines_that(lambda kind: kind.grammar))
        raise ValueError(
            f"{key}.structured: {called} can't constrain a judgement by a grammar; type {key}.structured=false, or "
            f"{key_of_model(judge.model)}.engine={able}"
        )
    if judge.vote in VOTES_WITH_META_RM and engine.outside:
        raise ValueError(
            f"{key}.vote: {judge.vote} needs a meta-RM, which reads the judge's tokens, and an endpoint returns none; "
            f"type {key}.vote=mean"
        )
