"""From the rewards of a group to advantages. Pure; what has no reward isn't here, so it can't be in a baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from grmpipe.train.settings import AlgorithmConfig

Estimator = Callable[[np.ndarray, AlgorithmConfig], np.ndarray]


def center(rewards_G: np.ndarray) -> np.ndarray:
    """Group-relative advantage without std scaling (Dr.GRPO, arXiv 2503.20783)."""
    return rewards_G - rewards_G.mean()


def standardize(rewards_G: np.ndarray, std: str, min_group_std: float) -> np.ndarray:
    """Group-relative advantage in units of the group's standard deviation (GRPO, arXiv 2402.03300).

    `min_group_std` is added to the deviation: rewards that differ by much less than it give advantages near 0, and no
    advantage is above sqrt(G - 1) in size.
    """
    spread = rewards_G.std(ddof=1 if std == "sample" else 0)
    return center(rewards_G) / (spread + min_group_std)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda rewards_G, algorithm: standardize(rewards_G, algorithm.std, algorithm.min_group_std),
    "dr_grpo": lambda rewards_G, algorithm: center(rewards_G),
}


def group_advantages(rewards: Mapping[int, float], algorithm: AlgorithmConfig) -> dict[int, float]:
    """Sibling -> advantage, for the siblings that have a reward. Fewer than two have nothing to be compared with."""
    if len(rewards) < 2:
        raise ValueError(f"min_valid_siblings: a baseline needs 2 rewards or more, got {len(rewards)}; drop the group")
    # float64: in float32 the rounding of a mean of equal rewards is as large as the epsilon it is divided by.
    rewards_G = np.array(list(rewards.values()), dtype=np.float64)
    advantages_G = ESTIMATORS[algorithm.estimator](rewards_G, algorithm)
    return dict(zip(rewards, advantages_G.tolist(), strict=True))
