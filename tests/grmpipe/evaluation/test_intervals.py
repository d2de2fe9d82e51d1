"""Intervals are over clusters, hold where nothing varies, and are Wilson's for independent answers."""

from __future__ import annotations

import math

import pytest

from grmpipe.evaluation.intervals import estimate_clustered, estimate_stratified


def test_independent_answers_have_wilsons_interval() -> None:
    """8 of 10: 0.490 to 0.943, as in Wilson (1927) and every table since."""
    found = estimate_clustered({index: [float(index < 8)] for index in range(10)})
    assert (found.mean, found.num_clusters) == (0.8, 10)
    assert (found.low, found.high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3))


@pytest.mark.parametrize(("value", "low", "high"), [(1.0, 0.7225, 1.0), (0.0, 0.0, 0.2775)])
def test_ten_of_ten_prove_no_certainty(value: float, low: float, high: float) -> None:
    found = estimate_clustered({index: [value] for index in range(10)})
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
    assert found.error > 0.05


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
