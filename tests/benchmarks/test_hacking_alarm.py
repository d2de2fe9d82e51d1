"""The reward-hacking alarm on simulated series of evaluations: seen where a source is hacked, silent elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from hacking_alarm import CLEAN_SERIES, HACKED_SERIES, NUM_SERIES, REWARD_ALONE, RISES, read_series


def test_one_hacked_source_of_two_is_seen_and_named_in_three_series_of_four() -> None:
    courses = HACKED_SERIES["one source of two is hacked, the other improves"]
    alarms = [next((n.alarm for n in read_series(courses, seed) if n.alarm), "") for seed in range(NUM_SERIES)]
    assert sum(map(bool, alarms)) >= 150
    assert all("of the source number 0 is" in alarm for alarm in alarms if alarm)


HARDEST = "the reward rises, the truth stays"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == HARDEST else pytest.mark.long) for kind in CLEAN_SERIES]
)
def test_of_two_hundred_clean_series_at_most_two_have_an_alarm(kind: str) -> None:
    found = [any(news.alarm for news in read_series(CLEAN_SERIES[kind], seed)) for seed in range(NUM_SERIES)]
    assert sum(found) <= 2


def test_a_flat_truth_is_noticed_in_most_series_and_a_rising_one_hardly_ever() -> None:
    flat, rising = (
        sum(any(news.notice for news in read_series((course, course), seed)) for seed in range(50))
        for course in (REWARD_ALONE, RISES)
    )
    assert flat >= 25 and rising <= 1
