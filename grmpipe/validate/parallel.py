"""Checks that the ranks of each learner can be grouped as its configuration says. Loads no weights."""

from __future__ import annotations

from grmpipe.config.run_config import RunConfig
from grmpipe.validate.sections import section
from scheduler.placement import Placement


def check_parallel(config: RunConfig, placement: Placement) -> None:
    """Raises ConfigError if copies, shared samples or divided experts don't fit the number of the learner's ranks."""
    if seats := placement.seats.get("learner"):
        with section("train.parallel."):
            config.train.parallel.check_ranks(len(seats))


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
    with section("train.parallel."):
        if config.train.parallel.ep > 1:
            check_divisible(outline, config.train.parallel.ep)
    with section("train."):
        if config.train.fp32_router:
            check_has_routers(outline)
