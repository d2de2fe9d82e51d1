"""Advantages by their formula's own numbers."""

from __future__ import annotations

import numpy as np
import pytest

from grmpipe.train.advantages import center, group_advantages, standardize
from grmpipe.train.settings import AlgorithmConfig

ONE_RIGHT = np.array([1.0, -1.0, -1.0, -1.0])


def test_grpo_divides_by_the_population_std() -> None:
    assert standardize(ONE_RIGHT, "population", 1e-6) == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=1e-3)


def test_grpo_divides_by_the_sample_std() -> None:
    assert standardize(ONE_RIGHT, "sample", 1e-6) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_dr_grpo_only_centers() -> None:
    assert center(ONE_RIGHT) == pytest.approx([1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("std", ["population", "sample"])
def test_equal_rewards_teach_nothing(std: str) -> None:
    advantages = group_advantages({0: 0.7, 1: 0.7, 2: 0.7}, AlgorithmConfig(std=std))
    assert list(advantages.values()) == pytest.approx([0, 0, 0], abs=1e-9)


@pytest.mark.parametrize("gap", [1e-16, 1e-9, 1e-7])
def test_nearly_equal_rewards_do_not_explode(gap: float) -> None:
    advantages = group_advantages({0: 0.5, 1: 0.5, 2: 0.5 + gap}, AlgorithmConfig())
    assert max(map(abs, advantages.values())) < 0.1


def test_a_lone_reward_has_no_baseline() -> None:
    with pytest.raises(ValueError, match="min_valid_siblings"):
        group_advantages({3: 1.0}, AlgorithmConfig())
