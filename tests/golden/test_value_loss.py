"""A critic's targets, losses and quality, against sums written out in float64 in another way than in the code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from grmpipe.algorithm.advantages import compute_gae, gae
from grmpipe.algorithm.parts import estimate
from grmpipe.algorithm.rewards import Rewards, charge_by_token
from grmpipe.algorithm.value_loss import value_loss, value_quality
from grmpipe.config.train import AlgorithmConfig

DRAW = np.random.default_rng(7)


def summed_gae(rewards_N: np.ndarray, values_N: np.ndarray, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, as a matrix of powers: no recursion."""
    deltas_N = rewards_N + gamma * np.append(values_N[1:], 0.0) - values_N
    steps_NN = np.arange(len(rewards_N))[None] - np.arange(len(rewards_N))[:, None]
    powers_NN = np.where(steps_NN >= 0, (gamma * lam) ** np.maximum(steps_NN, 0), 0.0)
    advantages_N = powers_NN @ deltas_N
    return advantages_N, advantages_N + values_N


def valued(num_tokens: int, reward: float) -> Rewards:
    """An outcome with a critic's values."""
    return Rewards(
        num_tokens=num_tokens, ends_K=(num_tokens,), values_K=(reward,), expected_N=DRAW.normal(size=num_tokens)
    )


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.5, 0.0)])
def test_advantages_and_returns_are_the_sums_of_the_paper(gamma: float, lam: float) -> None:
    rewards_N, values_N = DRAW.normal(size=(2, 40))
    found = gae(rewards_N, values_N, np.ones(40), gamma, lam)
    for mine, expected in zip(found, summed_gae(rewards_N, values_N, gamma, lam), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-12)


def test_an_outcome_falls_on_its_last_token_and_no_group_plays_a_part() -> None:
    algorithm = AlgorithmConfig(estimator="gae_raw", gamma=0.9, gae_lambda=0.8)
    groups = [[valued(5, 1.0), valued(3, -1.0)], [valued(4, 0.5), valued(2, 0.0)]]
    for group, advantages in zip(groups, estimate(groups, algorithm), strict=True):
        for rewards, advantages_N in zip(group, advantages, strict=True):
            rewards_N = np.zeros(rewards.num_tokens)
            rewards_N[-1] = rewards.outcome
            assert rewards.expected_N is not None
            np.testing.assert_allclose(advantages_N, summed_gae(rewards_N, rewards.expected_N, 0.9, 0.8)[0])


@pytest.mark.parametrize(("std", "ddof"), [("population", 0), ("sample", 1)])
def test_ppos_advantages_have_mean_0_and_deviation_1_over_the_batch_and_the_targets_stay(std: str, ddof: int) -> None:
    algorithm = AlgorithmConfig(estimator="gae", std=std)
    groups = [[valued(5, 1.0), valued(3, -1.0)], [valued(4, 0.5), valued(2, 0.0)]]
    raw = np.concatenate([compute_gae(rewards, algorithm)[0] for group in groups for rewards in group])
    found = np.concatenate([advantages_N for group in estimate(groups, algorithm) for advantages_N in group])
    np.testing.assert_allclose(found, (raw - raw.mean()) / (raw.std(ddof=ddof) + 1e-6), atol=1e-12)
    for rewards in groups[0]:
        assert compute_gae(rewards, algorithm)[1] == pytest.approx(
            [rewards.outcome] * rewards.num_tokens
        )  # gamma = lambda = 1


def test_a_cost_of_each_token_counts_from_that_token_on() -> None:
    """Costs 0.1, 0.2, 0.3 and a reward of 1 at the end: the remaining reward at each token."""
    paid = charge_by_token(Rewards(num_tokens=3, ends_K=(3,), values_K=(1.0,)), np.array([0.1, 0.2, 0.3]))
    assert paid.by_token() == pytest.approx([-0.1, -0.2, 0.7])
    assert paid.outcome == pytest.approx(0.4)
    _, returns_N = compute_gae(replace(paid, expected_N=np.zeros(3)), AlgorithmConfig(estimator="gae_raw"))
    assert returns_N == pytest.approx([0.4, 0.5, 0.7])


@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
def test_the_value_loss_and_its_gradient_are_the_formulas(clip: float | None) -> None:
    values, old, returns = DRAW.normal(size=(3, 200))
    values_T = torch.tensor(values, requires_grad=True)
    loss_T, clipped_T = value_loss(values_T, torch.tensor(old), torch.tensor(returns), clip)
    loss_T.sum().backward()
    plain, slope = (values - returns) ** 2, values - returns
    if clip is not None:
        held = old + np.clip(values - old, -clip, clip)
        inside = np.abs(values - old) < clip
        larger = (held - returns) ** 2 > plain
        np.testing.assert_array_equal(clipped_T, larger)
        assert 0 < larger.mean() < 1
        plain, slope = np.where(larger, (held - returns) ** 2, plain), np.where(larger & ~inside, 0.0, slope)
    np.testing.assert_allclose(loss_T.detach(), 0.5 * plain, atol=1e-12)
    np.testing.assert_allclose(values_T.grad, slope, atol=1e-12)


def test_a_value_far_from_the_old_one_is_clipped_only_where_that_is_the_worse() -> None:
    """v_old 0, clip 0.5, R 1: v = 2 counts 1, not 0.25; v = 0.8 counts 0.25 for 0.04. R -1: v = 2 counts 9."""
    loss_T, clipped_T = value_loss(torch.tensor([2.0, 0.8, 2.0]), torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), 0.5)
    assert loss_T.tolist() == pytest.approx([0.5, 0.125, 4.5]) and clipped_T.tolist() == [0, 1, 0]


def test_explained_variance_is_1_for_a_seer_0_for_a_constant_and_below_for_who_does_harm() -> None:
    returns = DRAW.normal(size=100)
    explained = [
        value_quality(values, returns)["critic/explained_variance"] for values in (returns, 0 * returns, -returns)
    ]
    assert explained == pytest.approx([1.0, 0.0, -3.0])
    halved = value_quality(0.5 * returns + 3, returns)
    assert halved["critic/explained_variance"] == pytest.approx(0.75)  # an offset explains as much
    assert halved["critic/value_mean"] - halved["critic/return_mean"] == pytest.approx(3 - 0.5 * returns.mean())
    assert "critic/explained_variance" not in value_quality(returns, np.ones(100))
