"""The parts of the comparison of several judges: its intervals and tables. Runs nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # a benchmark imports its neighbours like a script

import several_judges
from several_judges import COMPARISONS, Measured

from models.tiny.problem_sets import PROBLEM_SETS


def runs_of(*values: float) -> list[Measured]:
    own = {"asked": 8, "tokens": 100}
    summary = {"judging": {"by_judge": {"judge": own}}}
    return [Measured(seed=seed, true_accuracy=value, summary=summary) for seed, value in enumerate(values)]


def test_the_interval_over_seeds_is_students() -> None:
    assert several_judges.half_width_over_seeds([0.5, 0.6, 0.7]) == pytest.approx(4.30 * 0.1 / 3**0.5)
    assert several_judges.half_width_over_seeds([0.5]) == float("inf")


def test_the_interval_of_a_share_is_that_of_the_normal_distribution() -> None:
    assert several_judges.half_width_of_share(0.5, 2401) == pytest.approx(0.02)


def test_differences_are_taken_seed_by_seed() -> None:
    runs = {"jury": runs_of(0.7, 0.8, 0.9), "praise": runs_of(0.1, 0.2, 0.3)}
    assert several_judges.differences(runs, [("jury", "praise")])[-1] == (
        "| jury - praise | +0.600, +0.600, +0.600 | 0.600 ± 0.000 |"
    )


def test_tokens_are_told_judge_by_judge() -> None:
    assert several_judges.by_judge({"jury": runs_of(0.7, 0.8)})[-1] == "| jury | judge | 8 | 100 |"


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_names_its_own_variants_and_known_problems(name: str) -> None:
    comparison = COMPARISONS[name]
    assert {variant for pair in comparison.pairs for variant in pair} <= comparison.variants.keys()
    for variant in comparison.variants.values():
        assert f"{variant.problems}_held_out" in PROBLEM_SETS
        assert bool(variant.overrides) != (variant.run in comparison.variants)
