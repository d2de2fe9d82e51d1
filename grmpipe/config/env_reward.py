"""Settings of a judge that takes the environment's rewards. Frozen, checked; knows no environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EnvRewardConfig:
    """How the rewards that an environment gives for its turns become a verdict: their weighted sum."""

    # Weight of each of the environment's rewards, by its name; those that aren't named don't count. Empty: all count,
    # with weight 1.
    weights: dict[str, float] = field(default_factory=dict)
    # Where rewards go: to the tokens of the turn that earned them (true), or their sum to the last turn (false).
    by_turn: bool = False
    # Reward of an episode to which the environment gave none, as of an agent that ended at its limit of turns; null:
    # it has no verdict, and isn't trained.
    missing: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping):
            raise ValueError(
                f"weights: must be weights by name, got {self.weights!r}; type "
                "'judge.env_reward.weights={solved: 1.0, steps: -0.1}'"
            )
        for name, weight in self.weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(
                    f"weights.{name}: must be a number, got {weight!r}; type judge.env_reward.weights.{name}=1"
                )

        if self.missing is not None and not math.isfinite(self.missing):
            raise ValueError(f"missing: must be a finite number, or null for no verdict, got {self.missing}")

    def sum_of(self, rewards: Mapping[str, float]) -> float | None:
        """The weighted sum of a turn's rewards, by their names. None if none of them counts."""
        weights = self.weights or dict.fromkeys(rewards, 1.0)
        counted = [weights[name] * reward for name, reward in rewards.items() if name in weights]
        return math.fsum(counted) if counted else None
