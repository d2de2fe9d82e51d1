"""Checks of task=evaluate before anything starts. Writes nothing, starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grmpipe.config.judge import EarlyStopConfig, JudgeConfig
from grmpipe.config.roles import resolve_roles
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.labelled import load_labelled
from grmpipe.data.stream import PromptStream
from grmpipe.types import Labelled
from grmpipe.validate.context_limits import check_template
from grmpipe.validate.engines import check_installed
from grmpipe.validate.meta_rm_model import find_meta_rm
from grmpipe.validate.models import Progress, find_model
from grmpipe.validate.prepare import Prepared
from grmpipe.validate.seats import check_machine
from grmpipe.validate.sections import section
from grmpipe.validate.thinking import check_thinking_budget
from scheduler.placement import place


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """A checked evaluation, ready to start. Its judge has the largest k."""

    prepared: Prepared
    items: tuple[Labelled, ...]

    @property
    def config(self) -> RunConfig:
        return self.prepared.config


def prepare_evaluation(config: RunConfig, progress: Progress) -> PreparedEvaluation:
    """Find data and models, and check that the judge can be measured. Raises ConfigError."""
    config = replace(config, judge=measured(config))
    judge = config.judge
    with section("evaluate.path: "):
        items = load_labelled(
            config.evaluate.path, scale=(judge.score_min, judge.score_max), num_tiny=config.evaluate.num_items
        )[: config.evaluate.num_items]
    if config.judged_by_model:
        check_template(judge, [item.prompt for item in items])
    pools = {name: replace(pool, time_shared=False) for name, pool in config.placement.pools.items()}
    here = "grm" in config.roles
    weighted = here and config.meta_rm.path is not None  # measured next to the plain vote, for any judge.vote
    with section(""):
        needed = ("grm", "meta_rm") if weighted else ("grm",) if here else ()
        placement = place(replace(config.placement, pools=pools), needed, config.served, config.learners)
        roles = resolve_roles(config, placement)
    check_machine(config, placement)
    check_installed(roles, config)
    grm = find_model(roles.served["grm"], config, progress) if here else None
    if config.judged_by_model:
        check_thinking_budget(judge, roles.served["grm"], grm)
    with section("meta_rm."):
        meta_rm = find_meta_rm(config, grm, progress) if grm is not None and weighted else None
    prepared = Prepared(
        config=config,
        policy=find_model(roles.served["policy"], config, progress, weights=False),
        grm=grm,
        meta_rm=meta_rm,
        prompts=PromptStream([item.prompt for item in items]),
        held_out=(),
        placement=placement,
        roles=roles,
    )
    return PreparedEvaluation(prepared=prepared, items=items)


def measured(config: RunConfig) -> JudgeConfig:
    """The judge as it is measured: with the most judgements, and all of them requested."""
    judge, largest = config.judge, max(config.evaluate.ks)
    if judge.kind == "label":
        raise ConfigError("judge.kind: label rules on a judge in training by what it wrote; type judge=generative")
    if judge.protocol_kind.scores == "steps":
        raise ConfigError("judge.protocol: steps are cut in a policy's own tokens; type judge.protocol=pointwise")
    if judge.temperature == 0 and largest > 1:
        raise ConfigError("evaluate.ks: greedy judgements are all the same; type evaluate.ks=[1]")
    if judge.kind == "rule":
        return judge
    with section("evaluate.ks: judge."):
        return replace(judge, num_judgements=largest, early_stop=EarlyStopConfig())
