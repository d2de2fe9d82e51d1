"""Checks that the ranks of a learner can be grouped as its configuration says. Starts nothing, loads no weights."""

from __future__ import annotations

from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.validate.sections import section
from models.lm.footprint import Heads
from scheduler.placement import Placement


def check_parallel(config: RunConfig, placement: Placement) -> None:
    """Raises ConfigError if copies, shared samples or divided experts don't fit the number of the learner's ranks."""
    if seats := placement.seats.get("learner"):
        with section("train.parallel."):
            config.train.parallel.check_ranks(len(seats))


def check_query_heads(config: RunConfig, heads: Heads) -> None:
    """Raises ConfigError if ranks that share samples can't have equal numbers of the policy's query heads."""
    cp = config.train.parallel.cp
    if heads.query % cp:
        fitting = max(n for n in range(1, cp) if heads.query % n == 0)
        raise ConfigError(
            f"train.parallel.cp: {cp} ranks can't divide the {heads.query} query heads of policy.path evenly; type "
            f"train.parallel.cp={fitting}"
        )


def check_shares_no_samples(config: RunConfig) -> None:
    """Raises ConfigError if ranks of a model with a scalar head would share samples."""
    if config.train.parallel.cp > 1:
        raise ConfigError(
            f"train.parallel.cp: ranks of a model with a scalar head (task={config.task}) can't share samples; type "
            "train.parallel.cp=1"
        )


def check_experts(config: RunConfig, path: str) -> None:
    """Raises ConfigError if the experts of the model at `path` can't be divided over train.parallel.ep ranks, or if it
    has no routers for train.fp32_router.
    """
    if config.train.parallel.ep == 1 and not config.train.fp32_router:
        return
    from models.lm.causal_lm import outline_causal_lm  # late: seconds, which few runs need
    from models.lm.expert_parallel import check_divisible
    from models.lm.fp32_router import check_has_routers

    outline = outline_causal_lm(path)
    if config.train.parallel.ep > 1:
        with section("train.parallel."):
            check_divisible(outline, config.train.parallel.ep)
    if config.train.fp32_router:
        with section("train."):
            check_has_routers(outline)
