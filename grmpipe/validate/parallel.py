"""Checks that the ranks of a learner can be grouped as its configuration says. Starts nothing, loads no weights."""

from __future__ import annotations

from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.validate.sections import section
from models.lm.footprint import Heads, heads_of
from scheduler.placement import Placement


def check_parallel(config: RunConfig, placement: Placement) -> None:
    """Raises ConfigError if copies, shared samples or divided experts don't fit the number of a learner's ranks."""
    for learner, parallel in config.parallel.items():
        if seats := placement.seats.get(learner):
            with section(f"{config.key_of_learner(learner)}.parallel."):
                parallel.check_ranks(len(seats))


def check_divides(config: RunConfig, learner: str, section_of_model: str, path: str) -> None:
    """Raises ConfigError if the ranks of a learner can't divide the query heads or the experts of the model at
    `path`.
    """
    if config.parallel[learner].cp > 1:
        check_query_heads(config, learner, section_of_model, heads_of(path))
    check_experts(config, path, learner)


def check_query_heads(config: RunConfig, learner: str, section_of_model: str, heads: Heads) -> None:
    """Raises ConfigError if ranks that share samples can't have equal numbers of the query heads of their model."""
    cp, key = config.parallel[learner].cp, f"{config.key_of_learner(learner)}.parallel.cp"
    if heads.query % cp:
        fitting = max(n for n in range(1, cp) if heads.query % n == 0)
        raise ConfigError(
            f"{key}: {cp} ranks can't divide the {heads.query} query heads of {section_of_model}.path evenly; type "
            f"{key}={fitting}"
        )


def check_shares_no_samples(config: RunConfig) -> None:
    """Raises ConfigError if ranks of a model with a scalar head would share samples."""
    if config.train.parallel.cp > 1:
        raise ConfigError(
            f"train.parallel.cp: ranks of a model with a scalar head (task={config.task}) can't share samples; type "
            "train.parallel.cp=1"
        )


def check_experts(config: RunConfig, path: str, learner: str = "learner") -> None:
    """Raises ConfigError if the ranks of a learner can't divide the experts of the model at `path`, or if the policy
    has no routers for train.fp32_router (a judge or a critic next to a mixture may be dense).
    """
    ep, fp32_router = config.parallel[learner].ep, config.train.fp32_router and learner == "learner"
    if ep == 1 and not fp32_router:
        return
    from models.lm.causal_lm import outline_causal_lm  # late: seconds, which few runs need
    from models.lm.expert_parallel import check_divisible
    from models.lm.fp32_router import check_has_routers
    from models.lm.scalar_head import outline_scalar_head

    outline = outline_scalar_head(path) if learner == "critic" else outline_causal_lm(path)
    if ep > 1:
        with section(f"{config.key_of_learner(learner)}.parallel."):
            check_divisible(outline, ep)
    if fp32_router:
        with section("train."):
            check_has_routers(outline)
