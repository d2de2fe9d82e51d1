"""Who judges and teaches a run: its judges by name, the models that they ask, and the checks between both."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from grmpipe.config.engine_kinds import engine_kind, engines_that
from grmpipe.config.grm import ModelEntry
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.judge_tables import VOTES_WITH_META_RM
from grmpipe.config.keys.entry_names import GRM, JUDGE, POLICY
from grmpipe.models.engines.engine_kind import AnyEngine

SCORED_AT_ONCE = 1024  # rollouts that teachers have in flight


@dataclass(frozen=True, slots=True)
class Judging:
    """The judges whose verdicts make the reward, and the models that judges may ask.

    judges: name -> settings, of those that the reward uses, in its order.
    models: role -> settings, of every model that judges may ask, including those that none asks.
    teachers: roles of the models that teach the policy: they are served as those that judge.
    writers: roles of the models that write criteria.
    """

    judges: Mapping[str, JudgeConfig]
    models: Mapping[str, ModelEntry]
    teachers: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()

    @property
    def main(self) -> str:
        """The name of the judge whose scale is that of labels, and of the scores of all judges together: `judge`, or
        the only one that the reward uses.
        """
        return find_main(self.judges)

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
        return tuple(role for role in self.scalar_roles if not self.find_engine_kind(role).outside)

    @property
    def asked_roles(self) -> tuple[str, ...]:
        """All models that judges ask and that aren't the policy."""
        return (*self.roles, *self.scalar_roles)

    @property
    def roles(self) -> tuple[str, ...]:
        """The models besides the policy that judge, teach or write criteria, here or remote, and those whose engines
        serve some of them as adapters.
        """
        asked = {judge.model for judge in self.generative.values()}.union(self.teachers, self.writers)
        asked |= {self.models[role].host for role in asked & self.models.keys()}
        return tuple(role for role, model in self.models.items() if role in asked and not model.plays)

    @property
    def local_roles(self) -> tuple[str, ...]:
        """Those of them that need a place and files."""
        return tuple(role for role in self.roles if not self.find_engine_kind(role).outside)

    @property
    def host_roles(self) -> tuple[str, ...]:
        """The models whose engines here answer for all of them: adapters are served by those of another one."""
        return tuple(dict.fromkeys(self.models[role].host for role in self.local_roles))

    @property
    def remote_roles(self) -> tuple[str, ...]:
        """Those of them that are behind an endpoint."""
        return tuple(role for role in self.roles if self.find_engine_kind(role).outside)

    @property
    def by_policy(self) -> bool:
        """Whether the policy judges its own rollouts (self-rewarding, arXiv 2401.10020)."""
        return bool(self.select_asking(POLICY))

    @property
    def max_concurrency(self) -> int:
        """Most judge tasks in flight, without those of teachers."""
        return sum(judge.limits.max_concurrency for judge in self.judges.values())

    @property
    def tasks_at_once(self) -> int:
        """Most tasks in flight in the judge stage: also those of teachers, whose engines rank what waits."""
        return self.max_concurrency + (SCORED_AT_ONCE if self.teachers else 0)

    @property
    def weighted(self) -> dict[str, JudgeConfig]:
        """The judges whose votes a meta-RM weights."""
        return {name: judge for name, judge in self.generative.items() if judge.vote in VOTES_WITH_META_RM}

    def find_engine_kind(self, role: str) -> type[AnyEngine]:
        return engine_kind(self.models[role].engine, f"{self.models[role].key}.engine")

    def select_asking(self, role: str) -> dict[str, JudgeConfig]:
        """The judges that ask a model."""
        return {name: judge for name, judge in self.generative.items() if judge.model == role}

    def find_training_judge(self, role: str) -> JudgeConfig:
        """The judge whose prompts, limits and temperature a model in training learns under."""
        return next(iter(self.select_asking(role).values()))


def find_main(judges: Collection[str]) -> str:
    """The main one of the judges that a reward uses (`Judging.main`)."""
    return next(iter(judges)) if len(judges) == 1 else JUDGE


def check_all_used(judging: Judging, judges: Mapping[str, JudgeConfig], teachers: Collection[str] = ()) -> None:
    """Check that no further judge or model was configured in vain: the run would be trained without it. teachers: of
    the run or, when it trains on stored rollouts, of the one that stored them.
    """
    for name, judge in judges.items():
        if name not in judging.judges and name != JUDGE:
            raise ValueError(
                f"{judge.key}: the reward doesn't use it; type reward=mix 'reward.mix={{judge: 0.5, {name}: 0.5}}', "
                f"or reward.judge={name}, or, to let it only watch, 'judge_monitor.watch={{{name}: 0.2}}'"
            )
    writers = [judge.rubric.evolve.writer for judge in judging.judges.values()]
    for role, model in judging.models.items():
        if role not in (*judging.asked_roles, *teachers, *writers, POLICY, GRM):
            raise ValueError(
                f"{model.key}: no judge of this run asks it, and it teaches nothing; type "
                f"judges.<name>.model={role}, judge.rubric.evolve.writer={role}, "
                f"'algorithm.distill.teachers={{default: {role}}}', or leave it out: '~models.{role}'"
            )


def check_judging(judging: Judging) -> None:
    """Check that each judge's model exists, and can do what the judge asks."""
    for judge in (judging.generative | judging.scalar).values():
        if judge.model not in judging.models:
            added = judge.model.rpartition(".")[2]
            raise ValueError(
                f"{judge.key}.model: there is no model {judge.model!r}; type one of "
                f"{', '.join(judging.models)}"
                + (f", or add it by +grm@models.{added}=path" * (added not in judging.models))
            )
        writer = judge.rubric.evolve.writer
        if writer is not None and writer not in judging.models:
            raise ValueError(
                f"{judge.key}.rubric.evolve.writer: there is no model {writer!r}; type one of "
                f"{', '.join(judging.models)}, or add it by +grm@models.{writer}=path models.{writer}.path=<model>"
            )
    check_scalar(judging)
    for judge in judging.generative.values():
        check_engine(judge, judging)
    for model in (judging.models[role] for role in judging.asked_roles if judging.find_engine_kind(role).outside):
        key = model.key
        if model.path.startswith("tiny://"):
            raise ValueError(
                f"{key}.path: {model.path} is a shipped tiny model; with {key}.engine={model.engine} type the model's "
                f"name at the endpoint, as in {key}.path=gpt-4.1-mini"
            )


def check_teachers(judging: Judging) -> None:
    """Check that the engines of each teacher score tokens."""
    for role in judging.teachers:
        if role not in judging.models:
            raise ValueError(
                f"algorithm.distill.teachers: there is no model {role!r}; add it by +policy@models.{role}=path "
                f"models.{role}.path=<model>"
            )
        model = judging.models[role]
        if not judging.find_engine_kind(role).scores:
            able = " or ".join(engines_that(lambda kind: kind.scores))
            raise ValueError(
                f"{model.key}.engine: {model.engine} gives no log-probs of tokens that it is sent, so it can't serve a "
                f"teacher; type {model.key}.engine={able}"
            )


def check_scalar(judging: Judging) -> None:
    """Check that a scalar reward model is neither the policy nor a language model of another judge."""
    for judge in judging.scalar.values():
        if judge.model in (POLICY, *judging.roles):  # also those that write criteria
            raise ValueError(
                f"{judge.key}.model: {judge.model} is a language model, and a scalar judge asks a reward "
                f"model of its own; add one by +grm@models.reward_model=path models.reward_model.path=<model>, and "
                f"type {judge.key}.model=reward_model"
            )


def check_engine(judge: JudgeConfig, judging: Judging) -> None:
    """Check that the engine of a judge's model can do what the judge asks."""
    key, engine, model = judge.key, judging.find_engine_kind(judge.model), judging.models[judge.model]
    if judge.format.structured and not engine.grammar:
        able = " or ".join(engines_that(lambda kind: kind.grammar))
        raise ValueError(
            f"{key}.format.structured: {model.engine} can't constrain a judgement by a grammar; type "
            f"{key}.format.structured=false, "
            f"or {model.key}.engine={able}"
        )
    if judge.tools.is_set and engine.outside:
        able = " or ".join(engines_that(lambda kind: not kind.outside))
        raise ValueError(
            f"{key}.tools.functions: calls are read from the judge's own tokens, and an endpoint returns none; type "
            f"{model.key}.engine={able}, or {key}.tools.functions='' {key}.tools.mcp={{}}"
        )
    if judge.score_from == "expectation" and not engine.top_logprobs:
        able = " or ".join(engines_that(lambda kind: kind.top_logprobs))
        raise ValueError(
            f"{key}.score_from: {model.engine} returns no log-probs of the tokens that a judge might have written; "
            f"type {key}.score_from=text, or {model.key}.engine={able}"
        )
    if judge.score_from == "expectation" and engine.outside and judge.temperature not in (0, 1):
        raise ValueError(
            f"{key}.temperature: endpoints return log-probs before or after the temperature, so "
            f"{key}.score_from=expectation needs {key}.temperature=1 or 0, where both are the same"
        )
    for cut, value in {"top_k": judge.top_k, "min_p": judge.min_p}.items():
        if engine.outside and value:
            raise ValueError(
                f"{key}.{cut}: isn't part of the OpenAI protocol; type {key}.{cut}=0, and for a server that knows it "
                f"(vLLM, SGLang) +{model.key}.engine_options.extra_body.{cut}={value:g}"
            )
    if judge.vote in VOTES_WITH_META_RM and engine.outside:
        raise ValueError(
            f"{key}.vote: {judge.vote} needs a meta-RM, which reads the judge's tokens, and an endpoint returns none; "
            f"type {key}.vote=mean"
        )
