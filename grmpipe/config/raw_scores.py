"""Settings of judges that take numbers as scores: those of an environment, or the raw scores of a reward model."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from grmpipe.algorithm.advantages import sigmoid
from grmpipe.models.bounds import Bounded, at_least, finite, one_of, positive


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

    def sum_rewards(self, rewards: Mapping[str, float]) -> float | None:
        """The weighted sum of a turn's rewards, by their names. None if none of them counts."""
        weights = self.weights or dict.fromkeys(rewards, 1.0)
        counted = [weights[name] * reward for name, reward in rewards.items() if name in weights]
        return sum_rewards(counted) if counted else None


def sum_rewards(rewards: Iterable[float]) -> float:
    """The sum; NaN where no float holds it, so that the verdict fails."""
    try:
        return math.fsum(rewards)
    except (OverflowError, ValueError):  # beyond the largest float; infinities of both signs
        return math.nan


MAPS = ("sigmoid", "linear")


@dataclass(frozen=True)
class ScalarConfig(Bounded):
    """How the raw score of a scalar reward model becomes a reward from 0 to 1, and how it is batched."""

    # Curve: the probability that a Bradley-Terry model gives (sigmoid), or a straight line from low to high, cut off at
    # both (linear).
    map: str = one_of(MAPS, "sigmoid")
    center: float = finite(0.0)  # [raw score] For sigmoid: raw score of reward 0.5.
    # [raw score] For sigmoid: raw scores per unit of its argument; larger keeps scores apart that are far from center.
    width: float = positive(1.0, "above 0")
    low: float = finite(-10.0)  # [raw score] For linear: raw score of reward 0, and of all below.
    high: float = finite(10.0)  # [raw score] For linear: raw score of reward 1, and of all above.
    # Tokens of conversations per forward pass; a longer conversation is passed alone.
    max_batch_tokens: int = at_least(1, 16_384)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise ValueError(f"high: must be above low = {self.low:g}, got {self.high:g}")

    def to_reward(self, raw_score: float) -> float:
        """The reward of a finite raw score."""
        if self.map == "linear":
            return min(1.0, max(0.0, (raw_score - self.low) / (self.high - self.low)))
        return sigmoid((raw_score - self.center) / self.width)
