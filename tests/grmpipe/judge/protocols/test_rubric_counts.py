"""Counts of criteria: by name and tag, bounded, and which pairs say the same or the opposite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from grmpipe.judge.protocols.rubric_counts import MOST, PairCounts, RubricCounts
from grmpipe.types import JudgedCriterion


def count(*verdicts: Sequence[JudgedCriterion]) -> RubricCounts:
    counts = RubricCounts()
    for criteria in verdicts:
        counts.add(criteria)
    return counts


def shared(**met: float | None) -> list[JudgedCriterion]:
    return [JudgedCriterion(name=name, met=one, shared=True) for name, one in met.items()]


def test_metrics_are_by_name_for_shared_criteria_and_by_tag_for_all() -> None:
    verdicts = [
        [
            JudgedCriterion(name="is kind / short", met=met, shared=True, tags=("axis:tone",)),
            JudgedCriterion(name=f"own {met}", met=1.0, tags=("axis:tone", "other")),
        ]
        for met in (1.0, 0.5, None)
    ]
    assert count(*verdicts).metrics() == {
        "criterion/is_kind_short/met_mean": 0.75,
        "criterion/is_kind_short/met_std": 0.25,
        "criterion/is_kind_short/failed_share": pytest.approx(1 / 3),
        "tag/axis:tone/met_mean": 0.9,
        "tag/axis:tone/met_std": pytest.approx(math.sqrt(4.25 / 5 - 0.81)),
        "tag/axis:tone/failed_share": pytest.approx(1 / 6),
        "tag/other/met_mean": 1.0,
        "tag/other/met_std": 0.0,
        "tag/other/failed_share": 0.0,
    }
    assert count(*verdicts).describe() == (
        "criteria, how far met: is kind / short 0.75 (1 failed), [axis:tone] 0.90 (1 failed), [other] 1.00"
    )
    assert not RubricCounts().describe() and "met_mean" not in str(count(shared(a=None)).metrics())


def test_names_and_tags_are_bounded_in_number() -> None:
    many = [JudgedCriterion(name=f"c{n}", met=1.0, shared=True, tags=(f"t{n}",)) for n in range(3 * MOST)]
    counts = count(many, list(reversed(many)))
    assert len(counts.metrics()) == 2 * 3 * MOST and len(counts.pairs) <= 2 * 120
    assert counts.by_name["c0"].judged == 2


def test_counts_add_up_and_survive_a_checkpoint() -> None:
    one, other = count(shared(a=1.0, b=0.0)), count(shared(a=1.0, b=None), shared(a=0.25, b=0.25))
    both = count(shared(a=1.0, b=0.0), shared(a=1.0, b=None), shared(a=0.25, b=0.25))
    assert one + other == both == RubricCounts.restore(both.to_dict())
    assert both.pairs == {'"a" and "b"': PairCounts(judged=2, first=1, second=0, both=0)}


@pytest.mark.parametrize(
    ("together", "alone", "other", "neither", "said"),
    [
        (0, 30, 30, 40, ""),  # 9 by chance
        (0, 40, 40, 20, "are never met together (40 and 40 of 100 verdicts)"),
        (1, 40, 40, 19, ""),
        (40, 0, 0, 260, "were met by the same responses so far (both in 40 of 300 verdicts, never one alone)"),
        (40, 0, 0, 160, ""),  # one may imply the other
        (40, 1, 0, 259, ""),
        (295, 0, 0, 5, ""),  # both are nearly always met
        (5, 0, 0, 295, ""),
    ],
)
def test_pairs_that_are_never_or_always_met_together_contradict_each_other(
    together: int, alone: int, other: int, neither: int, said: str
) -> None:
    counts = count(
        *[shared(a=1.0, b=0.9)] * together, *[shared(a=1.0, b=0.1)] * alone,
        *[shared(a=0.0, b=1.0)] * other, *[shared(a=0.0, b=0.0)] * neither,
    )  # fmt: skip
    found = counts.find_contradictions()
    assert [*found] == (['"a" and "b"'] if said else []) and all(words.startswith(said) for words in found.values())
