"""Checks an evaluation of a judge, of a policy, or of both before anything starts."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grmpipe.config.io.key_errors import section
from grmpipe.config.judge import EarlyStopConfig, JudgeConfig, LabelConfig
from grmpipe.config.keys.entry_names import ENV, POLICY
from grmpipe.config.reward_checks import check_sources
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.run_judges import Judging
from grmpipe.data.labelled import load_labelled
from grmpipe.data.prompts import Data
from grmpipe.data.stream import PromptStream
from grmpipe.data.trained_prompts import FILE, digest_prompt, read_trained_prompts
from grmpipe.evaluation.evaluation_files import JUDGE_RESULTS
from grmpipe.evaluation.held_out import HELD_OUT
from grmpipe.evaluation.judge_comparison import MeasuredJudge, read_earlier
from grmpipe.judge.context_limits import check_template, check_thinking_budget
from grmpipe.judge.kinds import math_rule
from grmpipe.roles.find_models import META_RM, find_meta_rm, find_model, find_scalar_models
from grmpipe.roles.learners import check_lora_targets
from grmpipe.roles.machines import check_machine
from grmpipe.roles.role_placement import check_options
from grmpipe.roles.roles import resolve_roles
from grmpipe.run.prepare import Prepared, check_calibrations, check_env, check_fit
from grmpipe.run.run_prompts import check_references, load_held_out, note_unknown_truths, prompts_at, select_reaching
from grmpipe.scheduler.placement import place
from grmpipe.types import Labelled, Prompt, ScoredResponse

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts that the policy answers. num_left_out: without a reference, which the rule that judges them needs."""

    prompts: tuple[Prompt, ...]
    num_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """A checked evaluation, ready to start.

    measured:    the configuration under which a judge is measured: a single one has the largest k.
    items:       labelled work for it; none if only the policy is evaluated.
    num_unread:  items of evaluate.path beyond evaluate.num_items.
    earlier:     the judge of evaluate.against; None: there is none.
    prompt_sets: for the policy, by name; none if only the judge is evaluated.
    """

    prepared: Prepared
    measured: RunConfig
    items: tuple[Labelled, ...] = ()
    num_unread: int = 0
    earlier: MeasuredJudge | None = None
    prompt_sets: Mapping[str, PromptSet]

    @property
    def config(self) -> RunConfig:
        return self.prepared.config

    def notes(self) -> list[str]:
        """What is left out of the evaluation."""
        said = []
        if self.num_unread:
            total = len(self.items) + self.num_unread
            said.append(
                f"evaluate.num_items: only the first {len(self.items)} of {total} items are judged; for all of them "
                f"type evaluate.num_items={total}"
            )
        said += [
            f"evaluate.prompts.{name}: left out, without a reference, which the rule needs: {found.num_left_out} of "
            f"{found.num_left_out + len(found.prompts)} prompts"
            for name, found in self.prompt_sets.items()
            if found.num_left_out
        ]
        return said


def prepare_evaluation(config: RunConfig) -> PreparedEvaluation:
    """Find data and models, and check that the judge, or the policy, can be measured. Raises ConfigError."""
    config = config.without_adapters()
    what = config.evaluate.what
    under, (items, num_unread) = (
        (prepare_measurement(config), load_items(config)) if what != "policy" else (config, ((), 0))
    )
    prompt_sets = find_prompts(config) if config.plays else {}
    if config.plays:
        check_scoring(config.judging, config.data.labels)
        check_env(config)
    prompts = [prompt for found in prompt_sets.values() for prompt in found.prompts]
    prepared = find_judges(
        config,
        [*prompts, *(item.prompt for item in items)],
        weighted=what != "policy" and config.meta_rm.path is not None,
    )
    if config.plays:
        check_options(prepared.roles, config.asked, prepared.placement)
        check_fit(prepared, Data(train=tuple(prompts), held_out=()))
    earlier = None
    if what != "policy" and config.evaluate.against is not None:
        with section("evaluate.against: "):
            earlier = read_earlier(Path(config.evaluate.against), config.evaluate.against, JUDGE_RESULTS, items)
    return PreparedEvaluation(
        prepared=prepared,
        measured=under,
        items=items,
        num_unread=num_unread,
        earlier=earlier,
        prompt_sets=prompt_sets,
    )


def find_judges(
    config: RunConfig,
    prompts: Sequence[Prompt],
    *,
    weighted: bool = False,
    reads_policy: bool = True,
    samples_policy: bool = True,
) -> Prepared:
    """Find the models that judge, and assign their slots. Nothing learns.

    weighted:     whether a local judge needs a meta-RM even if no vote uses it.
    reads_policy: whether the policy's tokenizer is needed: what it wrote is read by its tokens.
    samples_policy: whether the policy's own engines play, where episodes are played.
    """
    math_rule.check_installed(config.judges.values())
    own = (POLICY,) if config.asked.by_policy or POLICY in config.asked.host_roles else ()
    here = (*own, *config.asked.local_roles)  # that engines serve here
    weighted = config.uses_meta_rm or (weighted and bool(here))
    samples_policy = samples_policy and config.plays
    playing = (*((POLICY,) if samples_policy else ()), *((ENV,) if config.places_envs else ()))
    needed = dict.fromkeys(
        (*playing, *own, *config.asked.host_roles, *config.asked.scorer_roles, *(META_RM,) * weighted)
    )
    with section(""):
        placement = place(config.placement.without_time_sharing(), tuple(needed), config.served, config.learners)
        roles = resolve_roles(config, placement)
    check_machine(config.cluster, placement)
    roles.check_installed(joined=config.cluster.is_joined)
    models = {role: find_model(roles.served[role], config.cluster) for role in here}
    for role, model in models.items():
        check_lora_targets(model, config.models[role])
    for asking in config.asked.generative.values():
        check_thinking_budget(asking, roles.served[asking.model], models.get(asking.model))
    weighting = {}
    if weighted:
        assert config.meta_rm.path is not None
        with section("meta_rm."):
            grms = [(models[role], config.models[role]) for role in here]
            weighting[META_RM] = find_meta_rm(config.meta_rm.path, grms)
    if POLICY not in models and reads_policy:
        models = {POLICY: find_model(roles.served[POLICY], config.cluster, weights=samples_policy)} | models
    prepared = Prepared(
        config=config,
        models=models | find_scalar_models(config) | weighting,
        prompts=PromptStream(prompts),
        held_out=(),
        placement=placement,
        roles=roles,
    )
    check_calibrations(prepared)
    return prepared


# -- a judge -------------------------------------------------------------------------------------------------------


def load_items(config: RunConfig) -> tuple[tuple[Labelled, ...], int]:
    """The labelled work, and the number of items beyond evaluate.num_items."""
    judge, count = config.main_judge, config.evaluate.num_items
    with section("evaluate.path: "):
        found = load_labelled(
            config.evaluate.path,
            scale=(judge.scale.low, judge.scale.high),
            num_tiny=count,
            columns=config.data.columns,
            score_range=config.data.labels.score_range,
        )
    found = leave_out_trained(config, found)
    items = found[:count]
    with section(""):
        sources = {item.prompt.source for item in items}
        check_sources(config.rewards, sources)
        for key, source in config.rewards.idle_routes(sources):
            log.warning("%s.%s: no item has this source, so that its judge isn't measured", key, source)
    for asking in config.asked.generative.values():
        check_template(asking, [item.prompt for item in items])
    pass_score = config.data.labels.pass_score
    is_on_scale = judge.scale.low < pass_score <= judge.scale.high
    if not is_on_scale and any(isinstance(item, ScoredResponse) and item.is_yes_no for item in items):
        raise ConfigError(
            f"data.labels.pass_score: parts yes from no, and {pass_score} isn't on the judge's scale from "
            f"{judge.scale.low} to {judge.scale.high}; type data.labels.pass_score={judge.scale.high} or less"
        )
    return items, len(found) - len(items)


def leave_out_trained(config: RunConfig, items: tuple[Labelled, ...]) -> tuple[Labelled, ...]:
    """The items on whose prompts no model that judges was trained, as far as its folder says so."""
    for role in config.asked.local_roles:
        model = config.models[role]
        with section(f"{model.key}.path: "):
            trained = read_trained_prompts(model.lora.path or model.path)
        kept = tuple(item for item in items if digest_prompt(item.prompt) not in trained) if trained else items
        if not kept:
            raise ConfigError(
                f"evaluate.path: {model.path} was trained on every prompt of {config.evaluate.path}; give labels of "
                f"other prompts, or remove {FILE} there"
            )
        if len(kept) < len(items):
            log.warning(
                "evaluate.path: %d of %d items are left out, on whose prompts %s was trained (%s there)",
                len(items) - len(kept), len(items), model.path, FILE,
            )  # fmt: skip
        items = kept
    return items


def prepare_measurement(config: RunConfig) -> RunConfig:
    """The configuration with single judges as they are measured: with the most judgements, and all of them requested.
    A composition, and a judge with a calibration, are measured as they judge.
    """
    for judge in config.asked.judges.values():
        check_measurable(judge)
    alone = {*config.watchers, *(config.judging.judges if len(config.judging.judges) == 1 else ())}
    largest, asked = max(config.evaluate.ks), dict(config.judges)
    for judge in (judge for name, judge in config.asked.generative.items() if name in alone):
        if not recounts_votes(config, judge):
            continue
        if judge.temperature == 0 and largest > 1:
            raise ConfigError("evaluate.ks: greedy judgements are all the same; type evaluate.ks=[1]")
        with section(f"evaluate.ks: {judge.key}."):
            asked[judge.name] = replace(judge, num_judgements=largest, early_stop=EarlyStopConfig())
    return replace(config, judges=asked)


def recounts_votes(config: RunConfig, judge: JudgeConfig) -> bool:
    """Whether smaller votes of a judge are counted: a calibration holds for one number of judgements."""
    return judge.kind == "generative" and config.task == "evaluate" and judge.calibration is None


def check_measurable(judge: JudgeConfig) -> None:
    key = judge.key
    if judge.kind == "label":
        raise ConfigError(f"{key}.kind: label rules on a judge in training by what it wrote; type judge=generative")
    if judge.kind == "env":
        raise ConfigError(f"{key}.kind: env judges no text, and labels are of texts; type judge=generative")
    if judge.protocol_kind.scores == "steps":
        raise ConfigError(f"{key}.protocol: steps are cut in a policy's own tokens; type {key}.protocol=pointwise")


# -- a policy ------------------------------------------------------------------------------------------------------


def find_prompts(config: RunConfig) -> dict[str, PromptSet]:
    """The prompts that the policy answers, by name. A rule needs references, which are checked; a prompt without one is
    left out.
    """
    paths = config.evaluate.prompts
    if paths is None:
        keys = {HELD_OUT: ("data.eval_path", config.data.eval_path or "")}
        with section("data.eval_path: "):
            found = {HELD_OUT: load_held_out(config)}
        if not found[HELD_OUT]:
            raise ConfigError(
                f"evaluate.prompts: is null, and data.path={config.data.path} has no held-out prompts; type "
                "'evaluate.prompts={mine: file.jsonl}', in quotes, or data.eval_path=file.jsonl"
            )
    else:
        keys = {str(name): (f"evaluate.prompts.{name}", path) for name, path in paths.items()}
        found = {}
        for name, (key, path) in keys.items():
            with section(f"{key}: "):
                found[name] = prompts_at(config, path, config.data.num_eval_prompts)
    with section(""):
        check_sources(config.rewards, {prompt.source for prompts in found.values() for prompt in prompts})
    sets = {}
    for name, prompts in found.items():
        (key, path), lacking = keys[name], set()
        for judge_name, judge in config.judging.judges.items():
            if judge.kind == "rule":
                judged = select_reaching(config.rewards, judge_name, prompts)
                lacking |= {prompt.prompt_id for prompt in judged if prompt.reference is None}
                with section(f"{key}: "):
                    check_references(judge, path, [prompt for prompt in judged if prompt.reference is not None])
        kept = tuple(prompt for prompt in prompts if prompt.prompt_id not in lacking)
        if not kept:
            raise ConfigError(
                f"{key}: no prompt has a reference, which the rule that scores the answers needs; add the field "
                "reference, or type judge=generative"
            )
        note_unknown_truths(config.truth, path, kept)
        sets[name] = PromptSet(prompts=kept, num_left_out=len(lacking))
    return sets


def check_scoring(judging: Judging, labels: LabelConfig) -> None:
    """Check that the judge can score single answers, and says which of them pass, if its rewards are on a scale."""
    for judge in judging.generative.values():
        if judge.protocol_kind.compares and len(judging.judges) == 1:
            raise ConfigError(
                f"{judge.key}.protocol: {judge.protocol} compares answers with each other, which doesn't say "
                f"how good a policy is; type judge=pointwise, or judge=rule"
            )
    main = judging.judges[judging.main]
    low, high = main.scale.low, main.scale.high
    if main.has_scale and not low < labels.pass_score <= high:
        raise ConfigError(
            f"data.labels.pass_score: pass@k counts answers of at least this score, and {labels.pass_score} isn't "
            f"on the judge's scale from {low} to {high}; type data.labels.pass_score={high} or less"
        )
