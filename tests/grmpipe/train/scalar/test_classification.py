"""Accuracy, AUC and calibration, by numbers computed by hand."""

from __future__ import annotations

import pytest

from grmpipe.train.scalar.classification import accuracy, auc, brier, calibration_error, quality

PROBABILITIES = [0.9, 0.8, 0.4, 0.3]
RIGHTS = [True, False, True, False]


def test_accuracy_is_at_one_half() -> None:
    assert accuracy([0.5, 0.49, 0.9], [True, False, False]) == pytest.approx(2 / 3)


def test_auc_counts_pairs_in_order_and_ties_by_half() -> None:
    assert auc(PROBABILITIES, RIGHTS) == pytest.approx(3 / 4)  # of four pairs, 0.4 < 0.8 is wrong
    assert auc([0.2, 0.2, 0.1], [True, False, False]) == pytest.approx(0.75)


def test_auc_doesnt_change_where_the_order_doesnt() -> None:
    assert auc([p**3 for p in PROBABILITIES], RIGHTS) == auc(PROBABILITIES, RIGHTS)


def test_brier_is_the_mean_squared_error() -> None:
    assert brier([1.0, 0.0, 0.5], [True, True, False]) == pytest.approx((0 + 1 + 0.25) / 3)


def test_calibration_compares_what_is_said_with_what_comes_true_by_bin() -> None:
    # Bin of 0.8: 0.85 on average, half are right. Bin of 0.1: 0.1, none is right.
    told = calibration_error([0.8, 0.89, 0.1, 0.1], [True, False, False, False])
    assert told == pytest.approx(0.5 * abs(0.845 - 0.5) + 0.5 * 0.1)
    assert calibration_error([1.0, 1.0], [True, True]) == 0.0  # the last bin holds its upper end


def test_without_both_kinds_there_is_no_auc() -> None:
    assert "auc" not in quality([0.3, 0.2], [True, True])
    assert quality(PROBABILITIES, RIGHTS)["base_rate"] == 0.5
