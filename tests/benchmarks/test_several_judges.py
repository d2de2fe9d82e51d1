"""The parts of the comparison of several judges: its intervals and tables. Runs nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # a benchmark imports its neighbours like a script

import cascade_audit
import several_judges
from several_judges import COMPARISONS, Measured


def runs_of(*values: float) -> list[Measured]:
    own = {"asked": 8, "tokens": 100}
    summary = {"judging": {"by_judge": {"judge": own}}}
    return [Measured(seed=seed, true_accuracy=value, summary=summary) for seed, value in enumerate(values)]


def test_the_interval_over_seeds_is_students() -> None:
    assert several_judges.half_width_over_seeds([0.5, 0.6, 0.7]) == pytest.approx(4.30 * 0.1 / 3**0.5)
    assert several_judges.interval([0.5]) == "0.500"


def test_the_interval_of_a_share_is_that_of_the_normal_distribution() -> None:
    assert several_judges.half_width_of_share(0.5, 2401) == pytest.approx(0.02)


def test_differences_are_taken_seed_by_seed() -> None:
    runs = {"jury": runs_of(0.7, 0.8, 0.9), "praise": runs_of(0.1, 0.2, 0.3)}
    assert several_judges.differences(runs, [("jury", "praise")])[-1] == (
        "| jury - praise | +0.600, +0.600, +0.600 | 0.600 ± 0.000 |"
    )


def test_a_run_with_one_judge_has_only_totals() -> None:
    alone = [Measured(seed=0, true_accuracy=0.7, summary={"judging": {"asked": 5, "tokens": 50, "by_judge": {}}})]
    assert several_judges.by_judge({"good": alone})[-1] == "| good | judge | 5 | 50 |"


def cascaded(alarms: list[str]) -> Measured:
    found = {"escalated_share": 0.4, "audited": 64, "audit_error": 0.02, "audit_error_se": 0.01, "flipped_share": 0.03}
    summary = {"judging": {"cascades": {"reward": found}}, "alarms": alarms}
    return Measured(seed=1, true_accuracy=0.7, summary=summary, kept_error=0.025, last_share=0.35)


def test_report_shows_an_audit_next_to_the_measured_error() -> None:
    quiet = several_judges.audits({"cascade": [cascaded([])]})
    assert quiet[-2] == "| cascade | 1 | 40% | 0.350 | 64 | 0.020 ± 0.020 | 0.025 | 3% | no |"
    assert quiet[-1] == "| cascade | mean | | 0.350 | | | 0.025 | | |"
    loud = several_judges.audits({"cascade": [cascaded(["The first judge is wrong where it is sure: ..."])]})
    assert loud[-2].endswith("| yes |")
    assert several_judges.audits({"jury": [Measured(seed=0, true_accuracy=0.7, summary={"judging": {}})]}) == []


def judged(reward: float, *judges: str) -> dict[str, object]:
    own = {"verdict": {"rewards": [{"value": reward}], "score": 1 + 9 * reward}}
    return {"group_id": "g", "sibling": 0, "by_judge": dict.fromkeys(("cheap", *judges), own)}


def test_a_kept_response_is_one_that_only_a_sure_first_judge_saw() -> None:
    assert cascade_audit.is_kept(judged(1.0)) and cascade_audit.is_kept(judged(0.25))
    assert not cascade_audit.is_kept(judged(0.5))
    assert not cascade_audit.is_kept(judged(1.0, "judge"))
    assert not cascade_audit.is_kept({"by_judge": {"cheap": {"failed": {"cause": "unparseable"}}}})


def test_report_counts_tokens_by_judge() -> None:
    assert several_judges.by_judge({"jury": runs_of(0.7, 0.8)})[-1] == "| jury | judge | 8 | 100 |"


def test_no_two_comparisons_have_a_variant_of_one_name_as_they_share_a_folder() -> None:
    names = [name for comparison in COMPARISONS.values() for name in comparison.variants]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_compares_variants_that_it_runs(name: str) -> None:
    comparison = COMPARISONS[name]
    assert {variant for pair in comparison.pairs for variant in pair} <= comparison.variants.keys()
    for variant in comparison.variants.values():
        assert variant.problems in comparison.problems
        assert bool(variant.overrides) != (variant.run in comparison.variants)
