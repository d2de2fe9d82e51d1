"""Advantages by the numbers of their formulas, and by enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.algorithm.advantages import best_of_k, center, gae, leave_one_out, returns, standardize, whiten
from grmpipe.algorithm.parts import ESTIMATORS, EstimatorKind, all_advantages_zero, estimate
from grmpipe.algorithm.rewards import Rewards
from grmpipe.algorithm.settings import MIN_GROUP_STD, PassAtK
from grmpipe.config.train import AlgorithmConfig

COMPARING = sorted(set(ESTIMATORS) - {"gae_raw"})  # gae_raw uses only a critic's values
ONE_RIGHT = np.array([1.0, -1.0, -1.0, -1.0])
FEW_REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(-3, 3), min_size=2, max_size=7)


def outcome(value: float, num_tokens: int = 1) -> Rewards:
    return Rewards(num_tokens=num_tokens, ends_K=(num_tokens,), values_K=(value,))


def steps(*values: float, tail: int = 0) -> Rewards:
    """One token per step, and tokens after the last reward."""
    return Rewards(num_tokens=len(values) + tail, ends_K=tuple(range(1, len(values) + 1)), values_K=values)


def estimated(name: str, *groups: list[Rewards], **keys: object) -> list[list[float]]:
    """Advantages by rollout, per token."""
    found = estimate(groups, AlgorithmConfig(estimator=name, **keys))  # type: ignore[arg-type]
    return [advantages_N.tolist() for group in found for advantages_N in group]


def first_token_only(group: Sequence[Rewards], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    return [np.zeros(1) for _ in group]


def not_a_number(group: Sequence[Rewards], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    return [np.full(rewards.num_tokens, np.nan) for rewards in group]


def nothing(group: Sequence[Rewards], algorithm: AlgorithmConfig) -> None: ...


def test_an_estimator_that_gives_no_number_for_each_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first_token_only", "not_a_number", "nothing"):
        monkeypatch.setitem(ESTIMATORS, name, EstimatorKind(function=globals()[name]))
        said = rf"^algorithm\.estimator: .*\.{name} \(.*\) returned .*finite number for each sampled token"
        with pytest.raises(ValueError, match=said):
            estimated(name, [outcome(0.0), outcome(1.0, num_tokens=2)])
    assert estimated("first_token_only", [outcome(0.0), outcome(1.0)]) == [[0.0], [0.0]]


# -- own group -------------------------------------------------------------------------------------------------------


def test_grpo_divides_by_the_population_std() -> None:
    assert standardize(ONE_RIGHT, "population") == pytest.approx([1.732, -0.577, -0.577, -0.577], abs=1e-3)


def test_grpo_divides_by_the_sample_std() -> None:
    assert standardize(ONE_RIGHT, "sample") == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "process", "process_grpo", "reinforce_pp", "reinforce_pp_baseline"])
def test_the_deviation_is_the_one_that_is_chosen(name: str) -> None:
    """Rewards 0, 1, 2 and 5 of one token each: mean 2, sum of squares about it 14."""
    group = [outcome(one) for one in (0.0, 1.0, 2.0, 5.0)]
    for std, unit in (("none", 1.0), ("population", math.sqrt(14 / 4)), ("sample", math.sqrt(14 / 3))):
        expected = [pytest.approx([one / unit], rel=1e-4) for one in (-2.0, -1.0, 0.0, 3.0)]
        assert estimated(name, group, std=std) == expected


def test_dr_grpo_only_centers() -> None:
    assert center(ONE_RIGHT) == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_rloo_compares_each_with_the_mean_of_the_others() -> None:
    rewards = np.array([1.0, 0.0, 0.5, 0.1])
    by_hand = [1.0 - 0.2, 0.0 - 1.6 / 3, 0.5 - 1.1 / 3, 0.1 - 0.5]
    assert leave_one_out(rewards) == pytest.approx(by_hand)
    assert leave_one_out(ONE_RIGHT) == pytest.approx([2.0, -2 / 3, -2 / 3, -2 / 3])


@pytest.mark.parametrize(("right", "k"), [(1, 2), (3, 4), (2, 3), (5, 4), (7, 2)])
def test_pass_at_k_has_the_papers_advantages_for_right_and_wrong(right: int, k: int) -> None:
    """R = 1 - C(n - c, k) / C(n, k); A+ = (1 - R) / s, A- = (1 - R - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / s."""
    size, wrong = 8, 8 - right
    mean = 1 - math.comb(wrong, k) / math.comb(size, k)
    spread = math.sqrt(mean * (1 - mean)) + 1e-6
    high = (1 - mean) / spread
    low = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)) / spread
    rewards = np.array([1.0] * right + [0.0] * wrong)
    assert best_of_k(rewards, k) == pytest.approx([high] * right + [low] * wrong, abs=1e-9)


@given(FEW_REWARDS, st.integers(1, 5))
def test_pass_at_k_is_what_counting_all_subsets_gives(rewards: list[float], k: int) -> None:
    size, k = len(rewards), min(k, len(rewards))
    best = {subset: max(rewards[i] for i in subset) for subset in itertools.combinations(range(size), k)}
    mean, spread = np.mean(list(best.values())), np.std(list(best.values()))
    with_it = [np.mean([value for subset, value in best.items() if i in subset]) for i in range(size)]
    expected = [(value - mean) / (spread + MIN_GROUP_STD) for value in with_it]
    assert best_of_k(np.array(rewards), k) == pytest.approx(expected, abs=1e-9)


def test_pass_at_1_is_grpo() -> None:
    rewards = np.array([0.3, 0.9, 0.1, 0.4])
    assert best_of_k(rewards, 1) == pytest.approx(standardize(rewards, "population"))


def test_a_large_group_counts_without_overflow() -> None:
    advantages = best_of_k(np.linspace(0, 1, 300), 150)
    assert np.isfinite(advantages).all() and advantages[-1] == advantages.max() > 0


@pytest.mark.parametrize("std", ["population", "sample", "none"])
@pytest.mark.parametrize("name", COMPARING)
def test_equal_rewards_teach_nothing(name: str, std: str) -> None:
    found = estimated(name, [outcome(0.7), outcome(0.7), outcome(0.7)], std=std)  # type: ignore[arg-type]
    assert found == [pytest.approx([0.0], abs=1e-9)] * 3


@pytest.mark.parametrize("gap", [1e-16, 1e-9, 1e-7])
@pytest.mark.parametrize("name", COMPARING)
def test_nearly_equal_rewards_do_not_explode(name: str, gap: float) -> None:
    found = estimated(name, [outcome(0.5), outcome(0.5), outcome(0.5 + gap)], pass_at_k=PassAtK(k=2))
    assert max(abs(advantage) for (advantage,) in found) < 0.1


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_lone_reward_has_no_baseline(name: str) -> None:
    with pytest.raises(ValueError, match="min_valid_siblings"):
        estimated(name, [outcome(1.0)])


# -- within a rollout ------------------------------------------------------------------------------------------------


def test_returns_are_discounted_sums_from_there_on() -> None:
    assert returns([1.0, 2.0, 4.0], 0.5) == pytest.approx([3.0, 4.0, 4.0])


def test_process_compares_returns_at_the_same_step() -> None:
    """Returns (3, 2) and (1, 0) and (2,): at step 0 they are 3, 1, 2, at step 1 only 2 and 0."""
    found = estimated("process", [steps(1.0, 2.0), steps(1.0, 0.0), steps(2.0)])
    root = math.sqrt(1.5)
    assert found[0] == pytest.approx([root, 1.0], abs=1e-5)
    assert found[1] == pytest.approx([-root, -1.0], abs=1e-5)
    assert found[2] == pytest.approx([0.0], abs=1e-5)


@pytest.mark.parametrize(("std", "first"), [("population", 1.0), ("sample", math.sqrt(0.5))])
def test_step_of_one_sibling_alone_and_tokens_after_the_last_reward_have_no_advantage(std: str, first: float) -> None:
    found = estimated("process", [steps(1.0, 5.0, tail=2), steps(0.0)], std=std)  # type: ignore[arg-type]
    assert found[0] == pytest.approx([first, 0.0, 0.0, 0.0], abs=1e-5)


def test_process_grpo_sums_rewards_that_are_normalised_together() -> None:
    """Rewards 1, 0 and 0, 3: mean 1, deviation sqrt(1.5)."""
    found = estimated("process_grpo", [steps(1.0, 0.0), steps(0.0, 3.0)])
    s = math.sqrt(1.5)
    assert found[0] == pytest.approx([-1 / s, -1 / s], abs=1e-5)
    assert found[1] == pytest.approx([1 / s, 2 / s], abs=1e-5)


@pytest.mark.parametrize("name", ["process", "process_grpo"])
def test_one_reward_at_the_end_makes_process_rewards_grpo(name: str) -> None:
    group = [outcome(0.3, 3), outcome(0.9, 1), outcome(0.0, 2)]
    assert estimated(name, group) == [pytest.approx(row) for row in estimated("grpo", group)]


def test_a_step_is_as_long_as_its_span() -> None:
    long = Rewards(num_tokens=5, ends_K=(3, 5), values_K=(1.0, 1.0))
    found = estimated("process", [long, steps(0.0, 0.0)])
    assert found[0] == pytest.approx([1.0] * 5, abs=1e-5)
    assert found[1] == pytest.approx([-1.0] * 2, abs=1e-5)


def of_mean(*earned: float) -> Rewards:
    """One token per step; the outcome is the mean of the steps' rewards."""
    share = 1 / len(earned)
    return replace(steps(*(share * one for one in earned)), shares_K=(share,) * len(earned))


SCORES = st.sampled_from([0.0, 0.3, 0.7, 1.0]) | st.floats(0, 1)
CONSTANT = st.lists(st.tuples(SCORES, st.integers(1, 9)), min_size=2, max_size=6)  # step reward, number of steps


def test_process_grpo_takes_the_mean_of_what_is_to_come_where_the_outcome_is_one() -> None:
    """Step rewards 1, 0 and 0, 1, 1, 0: mean 1/2, deviation 1/2, so +1 and -1 each."""
    found = estimated("process_grpo", [of_mean(1.0, 0.0), of_mean(0.0, 1.0, 1.0, 0.0)])
    assert found[0] == pytest.approx([0.0, -1.0], abs=1e-5)
    assert found[1] == pytest.approx([0.0, 1 / 3, 0.0, -1.0], abs=1e-5)


@given(score=SCORES, numbers=st.lists(st.integers(1, 9), min_size=2, max_size=6))
@pytest.mark.parametrize("name", ["process", "process_grpo"])
def test_equal_steps_give_no_advantage_however_many_there_are(name: str, score: float, numbers: list[int]) -> None:
    group = [of_mean(*[score] * number) for number in numbers]
    assert max(abs(one) for row in estimated(name, group) for one in row) < 1e-6
    assert all_advantages_zero(group, AlgorithmConfig(estimator=name))


@given(rollouts=CONSTANT, gamma=st.sampled_from([1.0, 0.9]))
@pytest.mark.parametrize("name", ["process", "process_grpo"])
def test_better_steps_throughout_never_get_less_than_worse_ones(
    name: str, rollouts: list[tuple[float, int]], gamma: float
) -> None:
    """At every step that both have; of process_grpo at any two steps."""
    found = estimated(name, [of_mean(*[score] * number) for score, number in rollouts], gamma=gamma)
    for better, worse in itertools.permutations(range(len(rollouts)), 2):
        if rollouts[better][0] > rollouts[worse][0]:
            assert all(a >= b - 1e-6 for a, b in zip(found[better], found[worse], strict=False))
            assert name == "process" or min(found[better]) >= max(found[worse]) - 1e-6


@given(group=st.lists(SCORES, min_size=2, max_size=6), k=st.integers(1, 5))
@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"gae", "gae_raw", "gae_turns"}))
def test_a_better_verdict_never_gets_a_lower_advantage_in_its_group(name: str, group: list[float], k: int) -> None:
    """Also next to another group, if the batch is whitened."""
    rows = estimated(name, [outcome(one) for one in group], [outcome(0.2, 3), outcome(0.9)], pass_at_k=PassAtK(k=k))
    ordered = [row[0] for _, row in sorted(zip(group, rows[: len(group)], strict=True), key=lambda pair: pair[0])]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(ordered))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_group_without_gradient_has_no_advantages_in_any_batch(name: str) -> None:
    """Groups of equal outcomes, of one token each. A critic's values, or the batch's mean, may give them advantages."""
    algorithm = AlgorithmConfig(estimator=name, pass_at_k=PassAtK(k=2))
    for equal in ([outcome(0.5), outcome(0.5)], [outcome(1.0)] * 4):
        found = estimate([equal, [outcome(0.2), outcome(0.9)]], algorithm)[0]
        assert all_advantages_zero(equal, algorithm) == (max(abs(float(one[0])) for one in found) < 1e-9)


def test_a_group_of_no_more_than_k_siblings_has_one_best_of_k_and_so_no_gradient() -> None:
    assert all_advantages_zero(
        [outcome(0.0), outcome(1.0)], AlgorithmConfig(estimator="pass_at_k", pass_at_k=PassAtK(k=2))
    )


def test_a_group_teaches_where_what_its_estimator_compares_differs() -> None:
    crossed = [steps(1.0, 0.0), steps(0.0, 1.0)]  # the same outcome from other steps
    for name, nothing in (("grpo", True), ("rloo", True), ("reinforce_pp_baseline", True), ("process", False)):
        assert all_advantages_zero(crossed, AlgorithmConfig(estimator=name)) is nothing
    assert all_advantages_zero([of_mean(*[0.7] * 3), of_mean(*[0.7] * 7)], AlgorithmConfig())  # up to rounding
    assert not all_advantages_zero([outcome(0.5), outcome(0.6)], AlgorithmConfig(estimator="process_grpo"))


def test_gae_equals_the_numbers_worked_out_by_hand() -> None:
    """gamma 0.5, lambda 0.5: deltas 0.0, 0.0, 0.5; advantages from the end 0.5, 0.125, 0.03125."""
    advantages, returned = gae(np.array([0.0, 0.0, 1.0]), np.array([0.125, 0.25, 0.5]), np.ones(3), 0.5, 0.5)
    assert advantages == pytest.approx([0.03125, 0.125, 0.5])
    assert returned == pytest.approx([0.15625, 0.375, 1.0])


def test_gae_at_lambda_1_is_the_return_less_the_value_and_at_0_the_td_error() -> None:
    draw = np.random.default_rng(0)
    rewards, values = draw.normal(size=9), draw.normal(size=9)
    monte_carlo, returned = gae(rewards, values, np.ones(9), 0.9, 1.0)
    assert monte_carlo == pytest.approx(returns(rewards.tolist(), 0.9) - values)
    assert returned == pytest.approx(returns(rewards.tolist(), 0.9))
    assert gae(rewards, values, np.ones(9))[1] == pytest.approx(rewards[::-1].cumsum()[::-1])
    td, _ = gae(rewards, values, np.ones(9), 0.9, 0.0)
    assert td == pytest.approx(rewards + 0.9 * np.append(values[1:], 0.0) - values)


def test_estimators_of_a_critic_take_its_values_and_both_discounts() -> None:
    """gamma 0.5, lambda 0.25: deltas 0, 0, 0.5; each advantage is an eighth of the next one."""
    valued = Rewards(num_tokens=3, ends_K=(3,), values_K=(1.0,), expected_N=np.array([0.125, 0.25, 0.5]))
    discounts = {"gamma": 0.5, "gae_lambda": 0.25}
    raw_N = np.array([0.5 / 64, 0.5 / 8, 0.5])
    assert estimated("gae_raw", [valued] * 2, **discounts) == [pytest.approx(raw_N.tolist())] * 2
    centered_N = raw_N - raw_N.sum() / 3
    assert estimated("gae", [valued] * 2, std="none", **discounts) == [pytest.approx(centered_N.tolist())] * 2
    scaled_N = centered_N / math.sqrt(2 * (centered_N**2).sum() / 5)  # 6 tokens
    assert estimated("gae", [valued] * 2, std="sample", **discounts) == [pytest.approx(scaled_N.tolist(), rel=1e-4)] * 2


def test_gae_carries_the_values_through_what_the_environment_said() -> None:
    """Wherever unsampled tokens are, and for any values of them, the sampled ones get the same."""
    rewards, values = np.array([0.1, 0.2, 1.0]), np.array([0.5, 0.3, 0.7])
    plain, returned = gae(rewards, values, np.ones(3), 0.9, 0.8)
    mask = np.array([1, 0, 0, 1, 0, 1])
    wide, wide_values = np.zeros(6), np.full(6, 99.0)
    wide[mask == 1], wide_values[mask == 1] = rewards, values
    advantages, wide_returned = gae(wide, wide_values, mask, 0.9, 0.8)
    assert advantages[mask == 1] == pytest.approx(plain) and wide_returned[mask == 1] == pytest.approx(returned)
    assert not advantages[mask == 0].any() and not wide_returned[mask == 0].any()


# -- whole batch -----------------------------------------------------------------------------------------------------


def test_whitening_is_over_the_tokens_of_the_batch() -> None:
    """Three tokens of 1 and one of -1: mean 0.5, deviation sqrt(0.75)."""
    groups = [[outcome(1.0, 3)], [outcome(-1.0)]]
    (first,), (second,) = whiten(groups, [[np.ones(3)], [-np.ones(1)]], "population")
    assert first == pytest.approx([0.5 / math.sqrt(0.75)] * 3, rel=1e-5)
    assert second == pytest.approx([-1.5 / math.sqrt(0.75)], rel=1e-5)
    (first,), _ = whiten(groups, [[np.ones(3)], [-np.ones(1)]], "sample")
    assert first == pytest.approx([0.5 / 1.0] * 3, rel=1e-5)


def test_two_tokens_are_enough_to_whiten_and_a_batch_that_trains_none_stays_as_it_is() -> None:
    pair = [[outcome(1.0)], [outcome(-1.0)]]
    (first,), (second,) = whiten(pair, [[np.ones(1)], [-np.ones(1)]], "population")
    assert (first[0], second[0]) == pytest.approx((1.0, -1.0), rel=1e-5)
    near = MIN_GROUP_STD / 10  # the deviation is less than what is added to it
    (first,), (second,) = whiten(pair, [[np.array([near])], [np.zeros(1)]], "population")
    assert 0 < first[0] < 0.1 and second[0] == pytest.approx(-first[0])
    ((same,),) = whiten([[masked(outcome(1.0, 3))]], [[np.ones(3)]], "population")
    assert same.tolist() == [1.0, 1.0, 1.0]


def masked(rewards: Rewards) -> Rewards:
    return replace(rewards, is_trained=False)


@pytest.mark.parametrize("name", ["reinforce_pp", "gae", "gae_turns", "reinforce_pp_baseline"])
def test_whitening_is_over_the_tokens_that_are_trained(name: str) -> None:
    """Four groups of three answers of 300 tokens, and of one that was cut at 16,000 and isn't trained."""
    draw = np.random.default_rng(0)
    groups = [
        [*(outcome(value, 300) for value in draw.normal(size=3)), masked(outcome(-1.0, 16_000))] for _ in range(4)
    ]
    found = estimate(groups, AlgorithmConfig(estimator=name))
    trained = np.concatenate([advantages_N for group in found for advantages_N in group[:3]])
    assert (trained.mean(), trained.std()) == pytest.approx((0.0, 1.0), abs=1e-5)


def test_reinforce_pp_has_no_group() -> None:
    """Rewards 0, 1, 2, 5 of one token each: mean 2, deviation sqrt(3.5), however they are grouped."""
    expected = [[-2 / math.sqrt(3.5)], [-1 / math.sqrt(3.5)], [0.0], [3 / math.sqrt(3.5)]]
    rows = [outcome(0.0), outcome(1.0), outcome(2.0), outcome(5.0)]
    for groups in ([rows], [rows[:2], rows[2:]]):
        assert estimated("reinforce_pp", *groups) == [pytest.approx(row, abs=1e-5) for row in expected]


def test_reinforce_pp_whitens_returns() -> None:
    """Returns 3, 2 and 1, 2 of two rollouts: mean 2, deviation sqrt(0.5)."""
    found = estimated("reinforce_pp", [steps(1.0, 2.0), steps(-1.0, 2.0)])
    s = math.sqrt(0.5)
    assert found == [pytest.approx([1 / s, 0.0], abs=1e-5), pytest.approx([-1 / s, 0.0], abs=1e-5)]


def test_reinforce_pp_baseline_takes_the_groups_mean_off_first() -> None:
    """Groups (0, 1) and (2, 5): centred -0.5, 0.5, -1.5, 1.5, deviation sqrt(1.25)."""
    found = estimated("reinforce_pp_baseline", [outcome(0.0), outcome(1.0)], [outcome(2.0), outcome(5.0)])
    s = math.sqrt(1.25)
    assert found == [pytest.approx([x / s], abs=1e-5) for x in (-0.5, 0.5, -1.5, 1.5)]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_estimators_of_a_group_ignore_other_groups_and_estimators_of_a_batch_dont(name: str) -> None:
    first, second = [outcome(0.0), outcome(1.0)], [outcome(2.0), outcome(7.0)]
    alone = estimated(name, first, pass_at_k=PassAtK(k=1)) + estimated(name, second, pass_at_k=PassAtK(k=1))
    together = estimated(name, first, second, pass_at_k=PassAtK(k=1))
    assert (alone == together) is (ESTIMATORS[name].need == "group")


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=5),
    st.floats(0.05, 2.0),
    st.lists(st.floats(-4, 4), min_size=5, max_size=5),
)
def test_dpo_has_the_gradient_of_the_loss_of_its_paper(rewards: list[float], beta: float, ratios: list[float]) -> None:
    """-log sigmoid(beta (h_chosen - h_rejected)), differentiated by h: h is a sum of log-probs, so that each token of a
    rollout has that gradient, and policy_gradient has minus the advantage.
    """
    group = [replace(outcome(reward, 3), log_ratio=ratio) for reward, ratio in zip(rewards, ratios, strict=False)]
    algorithm = AlgorithmConfig(
        estimator="dpo", loss="policy_gradient", aggregation="constant", kl_coefficient=beta, kl_estimator="k1",
        kl_in_reward=True,
    )  # fmt: skip
    (found,) = estimate([group], algorithm)
    chosen, rejected = rewards.index(max(rewards)), rewards.index(min(rewards))
    h = torch.tensor(ratios[: len(rewards)], dtype=torch.float64, requires_grad=True)
    if rewards[chosen] - rewards[rejected] > MIN_GROUP_STD:
        (-torch.nn.functional.logsigmoid(beta * (h[chosen] - h[rejected]))).backward()
    expected = torch.zeros(len(rewards), dtype=torch.float64) if h.grad is None else -h.grad
    np.testing.assert_allclose([advantages_N[0] for advantages_N in found], expected.numpy(), atol=1e-12)
    assert all((advantages_N == advantages_N[0]).all() and len(advantages_N) == 3 for advantages_N in found)


def test_estimators_that_choose_siblings_choose_among_those_that_are_trained() -> None:
    best_cut = [masked(outcome(1.0)), outcome(0.5), outcome(0.0)]
    assert estimated("raft", best_cut) == [[0.0], [1.0], [0.0]]
    dpo = {"loss": "policy_gradient", "aggregation": "constant", "kl_coefficient": 0.1}
    assert estimated("dpo", best_cut, **dpo) == [[0.0], [0.05], [-0.05]]  # type: ignore[arg-type]
    for too_few in ([masked(outcome(1.0)), masked(outcome(0.5)), outcome(0.0)], [masked(outcome(1.0))] * 2):
        for name in ("dpo", "raft"):
            assert not np.any(estimated(name, too_few, **dpo))  # type: ignore[arg-type]
            assert all_advantages_zero(too_few, AlgorithmConfig(estimator=name, kl_coefficient=0.1))


def test_a_group_without_a_trained_sibling_has_no_gradient_for_any_estimator() -> None:
    group = [masked(outcome(1.0)), masked(outcome(0.0))]
    assert all(all_advantages_zero(group, AlgorithmConfig(estimator=name)) for name in ESTIMATORS)
    assert not all_advantages_zero([*group, outcome(1.0)], AlgorithmConfig()), "they stay in its baseline"


def test_raft_imitates_the_best_of_a_group_and_nobody_where_all_are_equal() -> None:
    least = MIN_GROUP_STD  # by which rewards must differ more
    assert estimated("raft", [outcome(least), outcome(0.0), outcome(-1.0)]) == [[1.0], [1.0], [0.0]]
    best, equal = [outcome(0.2), outcome(0.9, 2), outcome(0.9)], [outcome(1.0), outcome(1.0)]
    assert estimated("raft", best, equal) == [[0.0], [1.0, 1.0], [1.0], [0.0], [0.0]]
