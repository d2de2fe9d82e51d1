"""Measures of agreement are those of their formulas, and of scipy and scikit-learn where they are installed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from grmpipe.evaluation.agreement import (
    compute_kendall,
    compute_quadratic_kappa,
    compute_spearman,
    fit_isotonic,
    map_crosswise,
    rank_values,
)


def draw_scores(count: int, seed: int) -> tuple[list[float], list[float]]:
    draw = np.random.default_rng(seed)
    labels = draw.integers(1, 11, count)
    scores = np.clip(labels + draw.integers(-3, 4, count), 1, 10)
    return scores.astype(float).tolist(), labels.astype(float).tolist()


def count_pairs(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Kendall's tau-b, pair by pair."""
    signs = [(np.sign(xs[i] - xs[j]), np.sign(ys[i] - ys[j])) for i, j in itertools.combinations(range(len(xs)), 2)]
    alike = sum(x * y for x, y in signs)
    return float(alike / math.sqrt(sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs)))


@pytest.mark.parametrize("count", [2, 40, 300])
def test_kendalls_tau_b_counts_pairs(count: int) -> None:
    xs, ys = draw_scores(count, count)
    assert compute_kendall(xs, ys) == pytest.approx(count_pairs(xs, ys), abs=1e-12)


def test_equal_values_share_their_ranks() -> None:
    assert rank_values([3, 1, 3, 2]).tolist() == [3.5, 1, 3.5, 2]
    assert compute_spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert math.isnan(compute_spearman([1, 1], [1, 2])) and math.isnan(compute_kendall([1, 2], [1, 1]))


def test_quadratic_kappa_is_that_of_the_confusion_matrix() -> None:
    scores, labels = draw_scores(200, 0)
    observed = np.zeros((10, 10))
    for score, label in zip(scores, labels, strict=True):
        observed[int(score) - 1, int(label) - 1] += 1
    weights = np.subtract.outer(np.arange(10), np.arange(10)) ** 2
    expected = np.outer(observed.sum(1), observed.sum(0)) / observed.sum()
    found = compute_quadratic_kappa(scores, labels)
    assert found == pytest.approx(1 - (weights * observed).sum() / (weights * expected).sum(), abs=1e-12)
    assert compute_quadratic_kappa([2, 5], [2, 5]) == 1 and math.isnan(compute_quadratic_kappa([2, 2], [2, 2]))


def test_the_figures_are_those_of_scipy_and_scikit_learn() -> None:
    stats = pytest.importorskip("scipy.stats")
    scores, labels = draw_scores(500, 1)
    assert compute_spearman(scores, labels) == pytest.approx(stats.spearmanr(scores, labels)[0], abs=1e-12)
    assert compute_kendall(scores, labels) == pytest.approx(stats.kendalltau(scores, labels)[0], abs=1e-12)
    metrics = pytest.importorskip("sklearn.metrics")
    kappa = metrics.cohen_kappa_score([*map(int, scores)], [*map(int, labels)], weights="quadratic")
    assert compute_quadratic_kappa(scores, labels) == pytest.approx(kappa, abs=1e-12)


def test_the_monotone_map_has_the_least_squared_error() -> None:
    """Against all maps on a grid that never fall."""
    scores, labels = [1, 2, 2, 3, 4, 5], [2.0, 1.0, 4.0, 2.0, 5.0, 4.0]
    fitted = fit_isotonic(scores, labels)
    assert np.interp([1, 2, 3, 4, 5], *fitted).tolist() == pytest.approx([2, 7 / 3, 7 / 3, 4.5, 4.5])
    assert np.interp([0, 1.5, 9], *fitted).tolist() == pytest.approx([2, 2 + 1 / 6, 4.5])
    own = ((np.interp(scores, *fitted) - labels) ** 2).sum()
    grid = [value / 2 for value in range(2, 11)]
    for levels in itertools.combinations_with_replacement(grid, 5):
        assert sum((levels[score - 1] - label) ** 2 for score, label in zip(scores, labels, strict=True)) >= own - 1e-9


def test_a_map_never_sees_the_prompts_that_it_is_measured_on() -> None:
    """Scores that say nothing of the labels: fitted to itself a map seems to help, by halves it doesn't."""
    draw = np.random.default_rng(0)
    scores, labels = draw.random(200).tolist(), draw.integers(1, 11, 200).astype(float).tolist()
    mapped = map_crosswise(scores, labels, list(range(200)))
    assert mapped is not None
    constant = np.abs(np.asarray(labels) - np.mean(labels)).mean()
    assert (
        np.abs(mapped - labels).mean()
        > constant
        > np.abs(np.interp(scores, *fit_isotonic(scores, labels)) - labels).mean()
    )
    assert map_crosswise([1, 2], [1, 2], ["same", "same"]) is None
    # A prompt's own labels never reach its scores: the one that is wrong stays as wrong as the other half makes it.
    shared = map_crosswise([1, 1, 2, 2], [9, 9, 1, 1], ["a", "a", "b", "b"])
    assert shared is not None and shared.tolist() == [1, 1, 9, 9]
