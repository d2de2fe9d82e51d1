"""Limits on metrics: when one is exceeded, what a resume remembers, what is refused."""

from __future__ import annotations

import math

import pytest

from grmpipe.config.judge_monitor import LimitConfig
from grmpipe.run.features.judge_monitor import Limits


def test_a_limit_is_new_once_until_the_metric_is_back() -> None:
    limits = Limits({"long": LimitConfig(metric="judge/x", above=0.5)})
    new = [
        [one.new for one in limits.read(step, {"judge/x": value})]
        for step, value in enumerate((0.5, 0.6, 0.7, 0.1, 0.9))
    ]
    assert new == [[], [True], [False], [], [True]]
    assert limits.metrics() == {"alarm/long": 1.0}


def test_a_step_without_the_metric_leaves_the_limit_as_it_was() -> None:
    limits = Limits({"low": LimitConfig(metric="judge/x", below=0.2, action="stop")})
    (told,) = limits.read(4, {"judge/x": 0.1})
    assert (told.action, told.text) == ("stop", "judge_monitor.limits.low: at step 4 judge/x is 0.1, below 0.2")
    assert limits.read(5, {"other": 1.0}) == []
    assert limits.metrics() == {"alarm/low": 1.0}


def test_a_resumed_limit_knows_that_it_was_exceeded() -> None:
    limits = Limits({"long": LimitConfig(metric="judge/x", above=0.5)}, exceeded=["long", "of before"])
    assert [one.new for one in limits.read(7, {"judge/x": 0.9})] == [False]


def test_a_limit_whose_metric_was_never_there_has_no_alarm() -> None:
    limits = Limits({"long": LimitConfig(metric="judge/x", above=0.5), "low": LimitConfig(metric="judge/y", below=0.5)})
    limits.read(1, {"judge/x": 0.1})
    assert limits.metrics() == {"alarm/long": 0.0}
    resumed = Limits({"low": LimitConfig(metric="judge/y", below=0.5)}, read_before=["low"])
    assert (resumed.metrics(), resumed.never_read(checks=True)) == ({"alarm/low": 0.0}, [])


def test_limit_on_an_unknown_metric_is_reported_with_the_nearest_name() -> None:
    limits = Limits({"long": LimitConfig(metric="judge/length_correlation", above=0.5)})
    limits.read(1, {"judge/score_length_correlation": 0.1})
    (told,) = limits.never_read(checks=True)
    assert "no step reported the metric judge/length_correlation; did you mean judge/score_length_correlation?" in told


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"above": 1.0}, "metric: missing"),
        ({"metric": "x"}, "above: give a finite number for above, below or both"),
        ({"metric": "x", "below": math.nan}, "above: give a finite"),
        ({"metric": "x", "above": 1.0, "action": "shout"}, "action: unknown value 'shout'; known: warn, pause, stop"),
    ],
)
def test_senseless_limit_is_refused(values: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LimitConfig(**values)
