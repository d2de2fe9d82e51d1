"""Intervals are over clusters, hold where nothing varies, and hold the truth in simulated series."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grmpipe.evaluation.intervals import (
    compute_t_tail,
    estimate_clustered,
    estimate_correlation,
    estimate_difference,
    estimate_stratified,
    find_t_quantile,
)
from grmpipe.evaluation.sampled_answers import pass_at


def test_independent_answers_have_at_least_the_interval_of_agresti_and_coull() -> None:
    """8 of 10: 0.478 to 0.951 with two successes and two failures added."""
    found = estimate_clustered({index: [float(index < 8)] for index in range(10)})
    assert (found.mean, found.num_clusters) == (0.8, 10)
    assert 0.46 < found.low < 0.478 and 0.951 < found.high < 0.97


@pytest.mark.parametrize(("value", "low", "high"), [(1.0, 0.6739, 1.0), (0.0, 0.0, 0.3261)])
def test_ten_of_ten_prove_no_certainty(value: float, low: float, high: float) -> None:
    found = estimate_clustered({index: [value] for index in range(10)})
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
    assert found.error > 0.05


def test_one_prompt_that_nearly_passes_proves_nothing_of_the_prompts_that_were_not_asked() -> None:
    """pass@4 of 100 prompts, all right in 8 of 8 answers but one, in 4 of 8. A hundred right ones show as much."""
    shares = {index: [1.0] for index in range(99)} | {99: [pass_at(8, 4, 4)]}
    found = estimate_clustered(shares)
    assert (found.mean, found.high) == (pytest.approx(0.99986, abs=1e-5), 1.0)
    assert found.low == pytest.approx(estimate_clustered({index: [1.0] for index in range(100)}).low, abs=1e-3)
    assert found.low < 0.96


def test_more_answers_to_a_prompt_still_narrow_the_interval() -> None:
    draw = np.random.default_rng(0)
    one, many = ({index: [share] for index, share in enumerate(draw.binomial(n, 0.5, 100) / n)} for n in (1, 16))
    assert estimate_clustered(many).error < 0.4 * estimate_clustered(one).error


def pass_rates(kind: str, shape: tuple[int, int], draw: np.random.Generator) -> np.ndarray:
    """Prompts of a kind: how often each is passed."""
    return {
        "all alike": lambda: np.full(shape, 0.5),
        "all easy": lambda: np.full(shape, 0.99),
        "easy and hard": lambda: np.where(draw.random(shape) < 0.3, 0.02, 0.98),
        "spread": lambda: draw.beta(0.6, 1.4, shape),
        "spread, near 1": lambda: draw.beta(0.45, 0.05, shape),
        "hardly one is never passed": lambda: np.where(draw.random(shape) < 0.01, 0.0, 1.0),
        "some half passed, hardly one never": lambda: np.select(
            [draw.random(shape) < 0.01, draw.random(shape) < 0.05], [0.0, 0.5], 1.0
        ),
    }[kind]()


KINDS = (
    "all alike", "all easy", "easy and hard", "spread", "spread, near 1", "hardly one is never passed",
    "some half passed, hardly one never",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "num_prompts"),
    [
        pytest.param(kind, count, marks=() if (count, kind) in ((30, KINDS[-1]), (10, KINDS[4])) else pytest.mark.long)
        for kind in KINDS
        for count in (10, 30, 100)
    ],
)
def test_intervals_hold_the_truth_in_19_of_20_series(kind: str, num_prompts: int) -> None:
    """avg@1, avg@8, pass@4 of 8 and pass@8 of 8, on drawn prompts with drawn answers; the truth is that of all prompts
    of the kind. Wilson's interval with the effective count held it in 66 to 80 % of some of these.
    """
    draw, num_series = np.random.default_rng(0), 300
    rates = pass_rates(kind, (num_series, num_prompts), draw)
    all_rates = pass_rates(kind, (1000, 100), draw)
    for num_answers, k in ((1, 1), (8, 1), (8, 4), (8, 8)):
        truth = float((1 - (1 - all_rates) ** k).mean())
        table = [pass_at(num_answers, passed, k) for passed in range(num_answers + 1)]
        held = 0
        for own in draw.binomial(num_answers, rates):
            found = estimate_clustered({index: [table[passed]] for index, passed in enumerate(own)})
            held += found.low - 1e-3 <= truth <= found.high + 1e-3
        assert held / num_series >= 0.92, (num_answers, k)


def test_copies_of_a_prompt_add_nothing() -> None:
    once = estimate_clustered({index: [float(index < 8)] for index in range(10)})
    thrice = estimate_clustered({index: [float(index < 8)] * 3 for index in range(10)})
    assert (thrice.mean, thrice.low, thrice.high) == pytest.approx((once.mean, once.low, once.high))
    spread = estimate_clustered({(index, copy): [float(index < 8)] for index in range(10) for copy in range(3)})
    assert spread.high - spread.low < 0.7 * (once.high - once.low)


def test_a_prompt_in_two_strata_counts_once() -> None:
    """Two strata of the same prompts with the same outcomes tell as much as one of them."""
    one = {index: [float(index < 8)] for index in range(10)}
    assert estimate_stratified([(3, one), (1, one)]).high == pytest.approx(estimate_clustered(one).high)
    other = {10 + index: [float(index < 8)] for index in range(10)}
    assert estimate_stratified([(1, one), (1, other)]).high < estimate_clustered(one).high


def test_a_stratum_without_spread_is_not_taken_for_certain() -> None:
    even = {index: [1.0] for index in range(10)}
    mixed = {10 + index: [float(index < 5)] for index in range(10)}
    known_certain = 0.5 * estimate_clustered(mixed).error
    assert estimate_stratified([(1, even), (1, mixed)]).error > 1.1 * known_certain


def test_rewards_on_no_scale_have_an_interval_around_their_mean() -> None:
    found = estimate_clustered({0: [-1.0], 1: [3.0]})
    assert (found.mean, found.low, found.high) == pytest.approx((1.0, 1 - 1.96 * 2, 1 + 1.96 * 2))


def test_empty_list_has_no_mean() -> None:
    assert math.isnan(estimate_clustered({}).mean) and math.isnan(estimate_clustered({}).error)


# -- two judges on the same items --------------------------------------------------------------------------------------


def draw_differences(
    size: int, parted: float, difference: float, largest: int, draw: np.random.Generator
) -> dict[int, list[float]]:
    """What two judges have right on items, minus each other: 1, 0 or -1. parted: items that only one has right.
    largest: items of a prompt, of which half come out alike.
    """
    sizes = draw.integers(1, largest + 1, size)
    prompts = np.repeat(np.arange(size), sizes)[:size]
    alike, own = draw.random(size)[prompts], draw.random(size)
    drawn = np.where((draw.random(size) < 0.5) & (largest > 1), alike, own)
    better, worse = (parted + difference) / 2, (parted - difference) / 2
    values = (drawn < better).astype(float) - ((drawn >= better) & (drawn < better + worse))
    clusters: dict[int, list[float]] = {}
    for prompt, value in zip(prompts.tolist(), values.tolist(), strict=True):
        clusters.setdefault(prompt, []).append(value)
    return clusters


def measure_coverage(size: int, kind: tuple[float, float, int], sets: int) -> float:
    draw, covered = np.random.default_rng(size), 0
    for _ in range(sets):
        found = estimate_difference(draw_differences(size, *kind, draw), are_shares=True)
        covered += found.low <= kind[1] <= found.high
    return covered / sets


# (items that only one has right, the true difference, items of a prompt): judges near each other, who part often, ...
PAIRED = [
    (0.05, 0.03, 1),
    (0.1, 0.05, 1),
    (0.3, 0.04, 1),
    (0.4, 0.2, 1),
    (0.1, 0.04, 5),
    (0.3, 0.04, 5),
    (0.05, 0.0, 1),
]


@pytest.mark.long
@pytest.mark.parametrize("kind", PAIRED)
@pytest.mark.parametrize(("size", "most"), [(20, 1.0), (50, 1.0), (200, 0.97), (1000, 0.97)])
def test_paired_intervals_hold_the_true_difference(size: int, most: float, kind: tuple[float, float, int]) -> None:
    assert 0.93 <= measure_coverage(size, kind, 2000) <= most


@pytest.mark.parametrize("kind", [(0.05, 0.03, 1), (0.3, 0.04, 5)])
def test_few_paired_items_hold_the_true_difference(kind: tuple[float, float, int]) -> None:
    """Of 20 items two judges mostly part on one or on none, which without a correction gives no width at all."""
    assert measure_coverage(20, kind, 400) >= 0.93


def test_a_paired_difference_is_a_t_test_with_half_a_value_for_either_side() -> None:
    values = [1.0] * 6 + [-1.0] * 2 + [0.0] * 12
    found = estimate_difference({i: [value] for i, value in enumerate(values)}, are_shares=True)
    weighted = np.asarray([*values, 1.0, -1.0]), np.asarray([1.0] * 20 + [0.5, 0.5])
    middle = np.average(weighted[0], weights=weighted[1])
    error = np.sqrt((weighted[1] * (weighted[0] - middle) ** 2).sum() * 21 / 20) / 21
    assert (found.mean, found.num_values, found.num_clusters) == (0.2, 20, 20)
    assert found.low == pytest.approx(middle - 2.0859634 * error)
    assert found.high == pytest.approx(middle + 2.0859634 * error)
    assert 0.157 < found.p < 0.289  # McNemar's test of 6 and 2, and the exact sign test
    same = estimate_difference({i: [0.0] for i in range(20)}, are_shares=True)
    assert same.p == 1 and same.low < -0.05 and same.high > 0.05


def test_differences_of_other_kinds_have_the_usual_clustered_t() -> None:
    found = estimate_difference({"a": [2.0, 3.0], "b": [-1.0], "c": [4.0]}, are_shares=False)
    residuals = np.asarray([5 - 2 * 2, -1 - 2, 4 - 2])
    error = np.sqrt((residuals**2).sum() * 3 / 2) / 4
    assert (found.mean, found.high) == (2.0, pytest.approx(2 + 4.3026527 * error))
    assert math.isnan(estimate_difference({}, are_shares=True).mean)
    one = estimate_difference({"a": [2.0]}, are_shares=False)
    assert (one.low, one.high) == (-math.inf, math.inf) and math.isnan(one.p)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062047), (2, 4.3026527), (5, 2.5705818), (20, 2.0859634), (1000, 1.9623390)]
)
def test_students_t_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert find_t_quantile(freedom) == pytest.approx(quantile, abs=1e-6)
    assert compute_t_tail(quantile, freedom) == pytest.approx(0.05, abs=1e-8)
    assert (compute_t_tail(0, freedom), compute_t_tail(1, 1)) == (1.0, pytest.approx(0.5))


def test_a_correlation_has_an_interval_over_clusters() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=200)
    y = x + draw.normal(size=200)

    def correlate(at: list[int]) -> float:
        return float(np.corrcoef(x[at], y[at])[0, 1])

    single = estimate_correlation(correlate, [[i] for i in range(200)])  # type: ignore[arg-type]
    z, error = math.atanh(single.mean), 1 / math.sqrt(197)
    assert single.low == pytest.approx(math.tanh(z - 1.97 * error), abs=0.03)
    assert single.high == pytest.approx(math.tanh(z + 1.97 * error), abs=0.03)
    doubled = estimate_correlation(correlate, [[i, i] for i in range(200)])  # type: ignore[arg-type]
    assert doubled.high - doubled.low == pytest.approx(single.high - single.low, rel=0.01)
    certain = estimate_correlation(lambda at: 1.0, [[i] for i in range(10)])
    assert certain.low < 0.7 and certain.high == 1
