"""What work costs in time: engines, learner, syncs, switches; from specs or measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from models.types import EngineSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpeed:
    """All ranks together."""

    token_s: float  # forward and backward of one packed token
    step_s: float  # the optimizer step


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a placement's processes take, by role."""

    engines: Mapping[str, EngineSpeed]  # of one engine of the role
    learner: LearnerSpeed
    sync_s: float  # a push of the policy's weights, the pause
    switch_s: float = 0.0  # an elastic slot's change of role
