"""pass@k is the unbiased estimate over all answers; a prompt weighs the same whatever failed of it."""

from __future__ import annotations

import itertools
import statistics

import pytest

from grmpipe.evaluation.sampled_answers import AnswerSampling, figures, pass_at, with_ends

COUNTING = AnswerSampling(num_samples=4, pass_k=(1, 4))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 2), (5, 2, 3), (6, 0, 2), (3, 3, 1), (4, 1, 4)])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_pass(n: int, c: int, k: int) -> None:
    subsets = [any(index < c for index in subset) for subset in itertools.combinations(range(n), k)]
    assert pass_at(n, c, k) == pytest.approx(statistics.fmean(subsets))


def test_means_are_over_prompts() -> None:
    passed = {"a": [1.0, 0.0, 0.0, 0.0], "b": [0.0] * 4}
    found = figures(passed, passed, COUNTING)
    assert {name: one.mean for name, one in found.items()} == {"avg_at_4": 0.125, "pass_at_1": 0.125, "pass_at_4": 0.5}
    assert set(with_ends(found)) == {f"{name}{end}" for name in found for end in ("", "_low", "_high")}


def test_a_failed_verdict_is_no_number() -> None:
    """Of `b` one verdict is left: it counts for itself, and for no k above one."""
    rewards = {"a": [0.4] * 4, "b": [1.0]}
    passed = {"a": [0.0] * 4, "b": [1.0]}
    found = figures(rewards, passed, COUNTING)
    assert found["avg_at_4"].mean == pytest.approx(0.7)
    assert found["pass_at_1"].mean == 0.5
    assert (found["pass_at_4"].mean, found["pass_at_4"].num_clusters) == (0.0, 1)


def test_figures_leave_out_what_is_unknown() -> None:
    assert set(figures({"a": [0.4]}, {}, COUNTING)) == {"avg_at_4"}
    assert figures({}, {}, COUNTING) == {}
