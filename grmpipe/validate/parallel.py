"""Checks that the ranks of each learner can be grouped as its configuration says."""

from __future__ import annotations

from grmpipe.config.run_config import RunConfig
from grmpipe.validate.sections import section
from scheduler.placement import Placement


def check_parallel(config: RunConfig, placement: Placement) -> None:
    """Raises ConfigError if copies, shared samples or divided experts don't fit the number of the learner's ranks."""
    if seats := placement.seats.get("learner"):
        with section("train.parallel."):
            config.train.parallel.check_ranks(len(seats))
