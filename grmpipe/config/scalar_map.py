"""Settings of a scalar reward model as a judge: how its raw score becomes a reward. Frozen, checked; holds no model."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAPS = ("sigmoid", "linear")


@dataclass(frozen=True)
class ScalarConfig:
    """How the raw score of a scalar reward model becomes a reward from 0 to 1, and how it is batched."""

    # Curve: the probability that a Bradley-Terry model gives (sigmoid), or a straight line from low to high, cut off at
    # both (linear).
    map: str = "sigmoid"
    center: float = 0.0  # [raw score] For sigmoid: raw score of reward 0.5.
    # [raw score] For sigmoid: raw scores per unit of its argument; larger keeps scores apart that are far from center.
    width: float = 1.0
    low: float = -10.0  # [raw score] For linear: raw score of reward 0, and of all below.
    high: float = 10.0  # [raw score] For linear: raw score of reward 1, and of all above.
    # Tokens of conversations per forward pass; a longer conversation is passed alone.
    max_batch_tokens: int = 16_384

    def __post_init__(self) -> None:
        if self.map not in MAPS:
            raise ValueError(f"map: unknown value {self.map!r}; known: {', '.join(MAPS)}")
        for key, value in (("center", self.center), ("low", self.low), ("high", self.high)):
            if not math.isfinite(value):
                raise ValueError(f"{key}: must be a number, got {value}")
        if not 0 < self.width < math.inf:
            raise ValueError(f"width: must be above 0, got {self.width}")
        if not self.low < self.high:
            raise ValueError(f"high: must be above low = {self.low:g}, got {self.high:g}")
        if self.max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens: must be at least 1, got {self.max_batch_tokens}")

    def reward_of(self, raw_score: float) -> float:
        """The reward of a finite raw score."""
        if self.map == "linear":
            return min(1.0, max(0.0, (raw_score - self.low) / (self.high - self.low)))
        return sigmoid((raw_score - self.center) / self.width)


def sigmoid(logit: float) -> float:
    """The sigmoid, without overflow for large logits."""
    power = math.exp(-abs(logit))
    return (1 if logit >= 0 else power) / (1 + power)
