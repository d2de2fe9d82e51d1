"""Checks that a training backend of the user's own is asked for nothing that only ours can do."""

from __future__ import annotations

from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.train import FSDP2
from scheduler.placement import Placement


def check_backend(config: RunConfig, placement: Placement) -> None:
    """Raises ConfigError if the learner must give its memory to engines: `LearnerRank` has no call for that."""
    if config.train.backend != FSDP2 and placement.time_sharing_roles:
        pool = placement.seats["learner"][0].pool
        raise ConfigError(
            f"train.backend: {config.train.backend} can't give its memory to the engines of the time-shared pool "
            f"{pool}; type train.backend={FSDP2}, or placement.pools.{pool}.time_shared=false"
        )
