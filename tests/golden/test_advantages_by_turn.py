"""Advantages by turn: by hand, and against sums written out in another way than in the code."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.algorithm.advantages import compute_gae, gae_of_turns, to_come_by_turn
from grmpipe.algorithm.parts import all_advantages_zero, estimate, estimator_named
from grmpipe.algorithm.rewards import Rewards, place_rewards
from grmpipe.algorithm.settings import GaeTurns, Gigpo, MtGrpo
from grmpipe.config.train import AlgorithmConfig
from grmpipe.models.types import Completion, VersionSpan
from grmpipe.types import RewardSpan, Rollout, Turn, Verdict

DRAW = np.random.default_rng(3)


def turns(*rewards: float, keys: str = "", length: int = 1, mean: bool = False) -> Rewards:
    """Turns of one length with a reward at the end of each; a letter names the state of each turn, a space none."""
    ends = tuple(length * (turn + 1) for turn in range(len(rewards)))
    share = 1 / len(rewards)
    return Rewards(
        num_tokens=ends[-1],
        ends_K=ends,
        values_K=tuple(share * reward for reward in rewards) if mean else rewards,
        shares_K=(share,) * len(rewards) if mean else None,
        turn_ends_U=ends,
        state_keys_U=tuple(key.strip() for key in keys),
    )


def estimated(name: str, group: list[Rewards], **keys: object) -> list[list[float]]:
    (found,) = estimate([group], AlgorithmConfig(estimator=name, **keys))  # type: ignore[arg-type]
    return [advantages_N.tolist() for advantages_N in found]


# -- GiGPO -----------------------------------------------------------------------------------------------------------


def test_gigpo_adds_the_comparison_of_turns_in_the_same_state() -> None:
    """gamma 0.5. Outcomes 2, 0, 1: mean 1. Returns from each turn on: (1.5, 1), (0, 0), (1). State a has 1.5, 0, 1,
    b has 1 and 0.
    """
    group = [turns(1.0, 1.0, keys="ab"), turns(0.0, 0.0, keys="ab"), turns(1.0, keys="a")]
    found = estimated("gigpo", group, gamma=0.5, std="none", gigpo=Gigpo(step_advantage_w=2.0))
    a = 2.5 / 3
    assert found[0] == pytest.approx([1 + 2 * (1.5 - a), 1 + 2 * 0.5])
    assert found[1] == pytest.approx([-1 + 2 * (0 - a), -1 - 2 * 0.5])
    assert found[2] == pytest.approx([0 + 2 * (1 - a)])


def test_gigpo_divides_each_comparison_by_its_own_deviation() -> None:
    group = [turns(0.0, 4.0, keys="xs"), turns(0.0, 2.0, keys="ys")]
    found = estimated("gigpo", group)
    assert found[0] == pytest.approx([1.0, 2.0], abs=1e-5), "the states x and y are met once"
    assert found[1] == pytest.approx([-1.0, -2.0], abs=1e-5)


def test_gigpo_counts_each_visit_of_a_state_that_a_rollout_meets_twice() -> None:
    """Returns from each turn on: (3, 2) and (0): mean 5 / 3."""
    found = estimated("gigpo", [turns(1.0, 2.0, keys="aa"), turns(0.0, keys="a")], std="none")
    assert found[0] == pytest.approx([1.5 + 3 - 5 / 3, 1.5 + 2 - 5 / 3])
    assert found[1] == pytest.approx([-1.5 - 5 / 3])


@pytest.mark.parametrize("keys", [("abc", "def"), ("   ", "   "), ("", "")])
def test_gigpo_is_grpo_where_no_state_repeats(keys: tuple[str, str]) -> None:
    group = [turns(0.1, 0.0, 0.7, keys=keys[0], length=3), turns(0.0, 0.2, 0.3, keys=keys[1], length=2)]
    assert estimated("gigpo", group, gamma=0.9) == estimated("grpo", group)


def test_gigpo_sees_a_gradient_where_outcomes_are_equal_and_turns_are_not() -> None:
    group = [turns(1.0, 0.0, keys="ab"), turns(0.0, 1.0, keys="ab")]
    assert not all_advantages_zero(group, AlgorithmConfig(estimator="gigpo"))
    assert all_advantages_zero(group, AlgorithmConfig(estimator="grpo"))
    alone = [turns(1.0, 0.0, keys="ab"), turns(0.0, 1.0, keys="cd")]
    assert all_advantages_zero(alone, AlgorithmConfig(estimator="gigpo"))


def test_equal_turns_give_gigpo_no_advantage_however_many_there_are_of_a_mean() -> None:
    group = [turns(*[0.7] * number, keys="s" * number, mean=True) for number in (1, 3, 5)]
    assert all_advantages_zero(group, AlgorithmConfig(estimator="gigpo"))


def test_what_is_to_come_of_a_mean_is_the_mean_by_share_and_nothing_after_the_last_reward() -> None:
    """Turns of one token; steps of shares 1/4 and 3/4 that earned 1 and 2, and a turn without a step."""
    rewards = Rewards(
        num_tokens=3, ends_K=(1, 2), values_K=(0.25, 1.5), shares_K=(0.25, 0.75), turn_ends_U=(1, 2, 3),
    )  # fmt: skip
    assert to_come_by_turn(rewards, 1.0).tolist() == [1.75, 2.0, 0.0]


def slow_gigpo(group: list[Rewards], gamma: float, weight: float) -> list[list[float]]:
    """One turn at a time, from the formulas of the paper."""
    totals = [math.fsum(rewards.values_K) for rewards in group]
    mean, deviation = float(np.mean(totals)), float(np.std(totals))
    found = []
    for rewards, total in zip(group, totals, strict=True):
        tokens: list[float] = []
        for t, key in enumerate(rewards.state_keys_U):
            own = sum(gamma ** (k - t) * rewards.values_K[k] for k in range(t, len(rewards.values_K)))
            alike = [
                sum(gamma ** (k - u) * other.values_K[k] for k in range(u, len(other.values_K)))
                for other in group
                for u, other_key in enumerate(other.state_keys_U)
                if other_key == key
            ]
            step = float((own - np.mean(alike)) / (np.std(alike) + 1e-6)) if key and len(alike) > 1 else 0.0
            start = rewards.turn_ends_U[t - 1] if t else 0
            tokens += [(total - mean) / (deviation + 1e-6) + weight * step] * (rewards.turn_ends_U[t] - start)
        found.append(tokens)
    return found


EPISODE = st.lists(st.tuples(st.sampled_from("ab c"), st.floats(-2, 2)), min_size=1, max_size=5)


@settings(max_examples=50)
@given(st.lists(EPISODE, min_size=2, max_size=5), st.integers(1, 3), st.sampled_from([1.0, 0.7]))
def test_gigpo_equals_the_slow_reference(episodes: list[list[tuple[str, float]]], length: int, gamma: float) -> None:
    group = [turns(*(r for _, r in one), keys="".join(key for key, _ in one), length=length) for one in episodes]
    found = estimated("gigpo", group, gamma=gamma, gigpo=Gigpo(step_advantage_w=0.5))
    for mine, expected in zip(found, slow_gigpo(group, gamma, 0.5), strict=True):
        assert mine == pytest.approx(expected, abs=1e-9)


# -- MT-GRPO ---------------------------------------------------------------------------------------------------------


def test_mt_grpo_adds_a_turns_own_advantage_to_that_of_the_outcome() -> None:
    """Outcomes 1, 0, 0, 1: +1 and -1. First turns 0, 2 of the two with a second turn: -1 and +1."""
    group = [turns(0.0, 1.0), turns(2.0, 0.0), turns(0.0), turns(1.0)]
    found = estimated("mt_grpo", group, mt_grpo=MtGrpo(turn_advantage_coef=0.5))
    assert [one for row in found for one in row] == pytest.approx([1 - 0.5, 1, -1 + 0.5, -1, -1, 1], abs=1e-5)


def test_the_outcome_of_mt_grpo_may_be_the_whole_episodes() -> None:
    """Outcomes 1, 2, 0, 1: 0, +1.41, -1.41, 0. Of the last turns alone the third would be no worse than the second."""
    group = [turns(0.0, 1.0), turns(2.0, 0.0), turns(0.0), turns(1.0)]
    found = estimated("mt_grpo", group, mt_grpo=MtGrpo(turn_advantage_coef=0.5, outcome="episode"))
    expected = [-0.5, 0, 2**0.5 + 0.5, 2**0.5, -(2**0.5), 0]
    assert [one for row in found for one in row] == pytest.approx(expected, abs=1e-5)


def test_a_turn_that_no_sibling_shares_has_the_outcomes_advantage_alone() -> None:
    found = estimated("mt_grpo", [turns(9.0, 1.0), turns(0.0)], std="none")
    assert found == [[0.5, 0.5], [-0.5]]


def test_mt_grpo_compares_turns_of_a_mean_by_their_own_rewards() -> None:
    group = [turns(1.0, 0.0, mean=True), turns(0.0, 0.5, 0.0, mean=True)]
    found = estimated("mt_grpo", group, std="none")
    assert found[0] == pytest.approx([0.5, 0.0]) and found[1] == pytest.approx([-0.5, 0.0, 0.0])


@pytest.mark.parametrize("name", ["gigpo", "mt_grpo"])
def test_one_turn_is_grpo(name: str) -> None:
    group = [turns(reward, keys="s", length=2) for reward in (0.3, 0.9, 0.0)]
    weights = {"gigpo": Gigpo(step_advantage_w=0.0)}
    assert estimated(name, group, **weights) == estimated("grpo", group)


# -- GAE over turns --------------------------------------------------------------------------------------------------


def valued(*lengths: int) -> Rewards:
    """Turns with a reward at the end of each, and a critic's values."""
    ends = tuple(np.cumsum(lengths).tolist())
    values = tuple(DRAW.normal(size=len(ends)).tolist())
    return Rewards(
        num_tokens=ends[-1], ends_K=ends, values_K=values, expected_N=DRAW.normal(size=ends[-1]), turn_ends_U=ends
    )


def test_gae_over_turns_equals_the_numbers_worked_out_by_hand() -> None:
    """Turns of 2 and 1 tokens, values 1, 2 and 4, rewards 3 and 5; high_level_gamma 0.5, lambda 1, gamma 1.

    Second turn: return 5, advantage 1. First: 3 + 0.5 * 4 - 2 + 0.5 * 1 = 3.5, return 5.5; its first token 5.5 - 1.
    """
    rewards = Rewards(
        num_tokens=3, ends_K=(2, 3), values_K=(3.0, 5.0), expected_N=np.array([1.0, 2.0, 4.0]), turn_ends_U=(2, 3)
    )
    advantages, returned = gae_of_turns(
        rewards, AlgorithmConfig(estimator="gae_turns", gae_turns=GaeTurns(high_level_gamma=0.5))
    )
    assert advantages == pytest.approx([4.5, 3.5, 1.0])
    assert returned == pytest.approx([5.5, 5.5, 5.0])


def slow_turns(rewards: Rewards, gamma: float, lam: float, by_turn: float) -> np.ndarray:
    """Sums of discounted errors, over turns and then over the tokens of each turn."""
    values, ends = rewards.expected_N, rewards.turn_ends_U
    assert values is not None
    last = [end - 1 for end in ends]
    errors = [
        reward + (by_turn * values[last[u + 1]] if u + 1 < len(last) else 0.0) - values[last[u]]
        for u, reward in enumerate(rewards.values_K)
    ]
    found = np.empty(rewards.num_tokens)
    for u, end in enumerate(ends):
        of_turn = sum((by_turn * lam) ** (k - u) * errors[k] for k in range(u, len(ends)))
        for t in range(ends[u - 1] if u else 0, end):
            inner = [gamma * values[k + 1] - values[k] for k in range(t, end - 1)]
            tail = (gamma * lam) ** (end - 1 - t) * of_turn
            # The step to the last token bootstraps from its value, and the turn's advantage is the rest.
            found[t] = sum((gamma * lam) ** k * error for k, error in enumerate(inner)) + tail
    return found


@pytest.mark.parametrize(("gamma", "lam", "by_turn"), [(1.0, 1.0, 0.95), (0.9, 0.8, 0.7), (1.0, 0.0, 1.0)])
def test_gae_over_turns_equals_the_slow_reference(gamma: float, lam: float, by_turn: float) -> None:
    algorithm = AlgorithmConfig(
        estimator="gae_turns", gamma=gamma, gae_lambda=lam, gae_turns=GaeTurns(high_level_gamma=by_turn)
    )
    rewards = valued(3, 1, 4, 2)
    found, returned = gae_of_turns(rewards, algorithm)
    np.testing.assert_allclose(found, slow_turns(rewards, gamma, lam, by_turn), atol=1e-12)
    np.testing.assert_allclose(returned, found + rewards.expected_N, atol=1e-12)


def test_gae_over_turns_without_discounts_is_gae_also_for_rewards_within_turns() -> None:
    """A reward in the middle of a turn counts once."""
    rewards = Rewards(
        num_tokens=9, ends_K=(2, 4, 8, 9), values_K=(1.0, 2.0, 4.0, 8.0), expected_N=DRAW.normal(size=9),
        turn_ends_U=(4, 4, 9),
    )  # fmt: skip
    algorithm = AlgorithmConfig(estimator="gae_turns", gae_turns=GaeTurns(high_level_gamma=1.0))
    for mine, expected in zip(gae_of_turns(rewards, algorithm), compute_gae(rewards, algorithm), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-12)


def test_a_turn_without_tokens_discounts_nothing() -> None:
    algorithm = AlgorithmConfig(estimator="gae_turns", gae_turns=GaeTurns(high_level_gamma=0.5))
    rewards = valued(1, 2, 3)
    (found, _), (expected, _) = (
        gae_of_turns(replace(rewards, turn_ends_U=ends_U), algorithm) for ends_U in ((1, 3, 3, 6), (1, 3, 6))
    )
    assert found == pytest.approx(expected)


def test_gae_over_turns_is_whitened_as_the_others_are() -> None:
    """Raw 4.5, 3.5 and 1, as by hand above, twice: mean 3, sum of squares about it 13."""
    rewards = Rewards(
        num_tokens=3, ends_K=(2, 3), values_K=(3.0, 5.0), expected_N=np.array([1.0, 2.0, 4.0]), turn_ends_U=(2, 3)
    )
    discount = GaeTurns(high_level_gamma=0.5)
    centered, deviation = (1.5, 0.5, -2.0), math.sqrt(13 / 5)
    for std, unit in (("none", 1.0), ("sample", deviation)):
        found = estimated("gae_turns", [rewards] * 2, gae_turns=discount, std=std)
        assert found == [pytest.approx([one / unit for one in centered], rel=1e-4)] * 2


def test_the_critic_learns_the_returns_of_its_estimator() -> None:
    rewards = valued(2, 3)
    of_turns, of_tokens = (
        estimator_named(name).targets(rewards, AlgorithmConfig(gae_turns=GaeTurns(high_level_gamma=0.5)))
        for name in ("gae_turns", "gae")
    )
    assert np.abs(of_turns[1] - of_tokens[1]).max() > 1e-3
    np.testing.assert_allclose(of_tokens[1], compute_gae(rewards, AlgorithmConfig())[1])


# -- the rewards of turns --------------------------------------------------------------------------------------------


def test_a_verdicts_rewards_find_their_turns_and_states() -> None:
    rollout = Rollout(
        group_id="g",
        sibling=0,
        status="finished",
        turns=tuple(
            Turn(
                new_ids=(1,),
                state_key=key,
                completion=Completion(
                    token_ids=(7,) * length, logprobs=(-1.0,) * length, text="", finish_reason="stop",
                    versions=(VersionSpan(model="policy", version=0, start=0, end=length),),
                ),
            )
            for key, length in (("a", 2), ("", 3), ("b", 1))
        ),
    )  # fmt: skip
    spans = ((2, 0, 1, 4.0), (0, 0, 2, 1.0), (1, 0, 1, 2.0), (1, 1, 2, 0.5))
    rewards = place_rewards(
        rollout,
        Verdict(
            rewards=tuple(RewardSpan(turn=t, start=start, end=end, value=value) for t, start, end, value in spans),
            score=0.0, breakdown={}, score_std=0.0, num_judgements=1,
        ),
    )  # fmt: skip
    assert rewards.state_keys_U == ("a", "", "b") and rewards.turn_ends_U == (2, 5, 6)
    assert rewards.by_turn().tolist() == [1.0, 2.5, 4.0]
    assert rewards.over_turns(np.array([1.0, 2.0, 3.0])).tolist() == [1, 1, 2, 2, 2, 3]
