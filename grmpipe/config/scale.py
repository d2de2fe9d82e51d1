"""The scale of a judge's scores. Pure; parses nothing, votes on nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The scores that a judge may give: integers, both ends included."""

    low: int = 1
    high: int = 10

    def reward_of(self, score: float) -> float:
        """0 at the low end, 1 at the high end."""
        return (score - self.low) / (self.high - self.low)
