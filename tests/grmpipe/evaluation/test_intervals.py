"""Intervals are over clusters, hold where nothing varies, and hold the truth in simulated series."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grmpipe.evaluation.intervals import estimate_clustered, estimate_stratified
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
