"""Checks of task=evaluate before anything starts. Writes nothing, starts nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from grmpipe.config.judge import EarlyStopConfig, JudgeConfig
from grmpipe.config.judging import POLICY, key_of_judge
from grmpipe.config.reward import idle_routes
from grmpipe.config.reward_checks import check_sources
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
from grmpipe.validate.scalar_model import find_scalar_models
from grmpipe.validate.seats import check_machine
from grmpipe.validate.sections import section
from grmpipe.validate.thinking import check_thinking_budget
from scheduler.placement import place

log = logging.getLogger(__name__)


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
    config = measured(config)
    first = config.first_judge
    with section("evaluate.path: "):
        items = load_labelled(
            config.evaluate.path, scale=(first.score_min, first.score_max), num_tiny=config.evaluate.num_items
        )[: config.evaluate.num_items]
    with section(""):
        sources = {item.prompt.source for item in items}
        check_sources(config.reward, config.rewards, sources)
        for key, source in idle_routes(config.reward, config.rewards, sources):
            log.warning("%s.%s: no item has this source, so that its judge isn't measured", key, source)
    for name, asking in config.judging.generative.items():
        check_template(key_of_judge(name), asking, [item.prompt for item in items])
    pools = {name: replace(pool, time_shared=False) for name, pool in config.placement.pools.items()}
    here = ((POLICY,) if config.judging.by_policy else ()) + config.judging.local_roles
    weighted = bool(here) and config.meta_rm.path is not None  # measured next to the plain vote, for any judge.vote
    with section(""):
        scorers = (*config.judging.scorer_roles, *("meta_rm",) * weighted)
        needed = (*here, *scorers)
        placement = place(replace(config.placement, pools=pools), needed, config.served, config.learners)
        roles = resolve_roles(config, placement)
    check_machine(config, placement)
    check_installed(roles, config)
    grms = tuple(find_model(roles.served[role], config, progress) for role in here)
    known = {grm.name: grm for grm in grms}
    for name, asking in config.judging.generative.items():
        check_thinking_budget(key_of_judge(name), asking, roles.served[asking.model], known.get(asking.model))
    with section("meta_rm."):
        meta_rm = find_meta_rm(config, grms, progress) if weighted else None
    prepared = Prepared(
        config=config,
        policy=find_model(roles.served[POLICY], config, progress, weights=False),
        grms=grms,
        scalars=find_scalar_models(config, progress),
        meta_rm=meta_rm,
        prompts=PromptStream([item.prompt for item in items]),
        held_out=(),
        placement=placement,
        roles=roles,
    )
    return PreparedEvaluation(prepared=prepared, items=items)


def measured(config: RunConfig) -> RunConfig:
    """The configuration with a single judge as it is measured: with the most judgements, and all of them requested. A
    composition is measured as it judges.
    """
    for name, judge in config.judging.judges.items():
        check_measurable(key_of_judge(name), judge)
    if len(config.judging.generative) != 1 or len(config.judging.judges) != 1:
        return config
    ((name, judge),) = config.judging.generative.items()
    largest = max(config.evaluate.ks)
    if judge.temperature == 0 and largest > 1:
        raise ConfigError("evaluate.ks: greedy judgements are all the same; type evaluate.ks=[1]")
    with section(f"evaluate.ks: {key_of_judge(name)}."):
        return config.with_judge(name, replace(judge, num_judgements=largest, early_stop=EarlyStopConfig()))


def check_measurable(key: str, judge: JudgeConfig) -> None:
    if judge.kind == "label":
        raise ConfigError(f"{key}.kind: label rules on a judge in training by what it wrote; type judge=generative")
    if judge.kind == "env":
        raise ConfigError(f"{key}.kind: env judges no text, and labels are of texts; type judge=generative")
    if judge.protocol_kind.scores == "steps":
        raise ConfigError(f"{key}.protocol: steps are cut in a policy's own tokens; type {key}.protocol=pointwise")
