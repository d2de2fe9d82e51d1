"""The alarm on cascades: when it is raised, and when again."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import cast

import pytest

from grmpipe.judge.composition.cascade_counts import CascadeCounts
from grmpipe.run.features.judge_alarms import CascadeAlarm
from grmpipe.run.features.run_feature import StepEnd
from grmpipe.types import CascadeEvent


def audits(errors: list[float]) -> CascadeCounts:
    counts = CascadeCounts()
    for error in errors:
        counts.count(CascadeEvent(cascade="reward", audited=4, error=4 * error, flipped=1))
    return counts


def test_the_alarm_needs_an_error_that_is_surely_above_its_limit() -> None:
    alarm = CascadeAlarm({"reward": 0.1})
    assert alarm.check({"reward": audits([0.2] * 9)}) == [], "too few audits"
    assert alarm.metrics() == {}, "nothing is known of the error"
    assert alarm.check({"reward": audits([0.0, 0.25] * 8)}) == [], "the mean is above, but not surely"
    (text,) = alarm.check({"reward": audits([0.2, 0.3] * 8)})
    assert "cascade reward" in text and "0.250 on average" in text and "25%" in text
    assert alarm.check({"reward": audits([0.2, 0.3] * 9)}) == [], "it was said"
    assert alarm.metrics() == {"alarm/cascade": 1.0}
    assert alarm.check({"reward": audits([0.0] * 20)}) == []
    assert alarm.metrics() == {"alarm/cascade": 0.0}
    assert len(alarm.check({"reward": audits([0.3] * 20)})) == 1, "it is news again"


def test_without_a_cascade_there_is_no_alarm() -> None:
    assert CascadeAlarm({}).metrics() == {}


def test_an_alarm_that_was_raised_before_a_resume_is_no_news() -> None:
    before, after = CascadeAlarm({"reward": 0.1}), CascadeAlarm({"reward": 0.1})
    assert len(before.check({"reward": audits([0.3] * 20)})) == 1
    after.restore(before.state())
    assert after.check({"reward": audits([0.3] * 20)}) == [] and after.metrics() == {"alarm/cascade": 1.0}


def test_of_a_judge_that_learns_only_the_latest_audits_count() -> None:
    alarm = CascadeAlarm({"reward": 0.1}, ["reward"])
    steps = [audits([0.5] * 15)] * 2 + [audits([0.02, 0.04] * 5)] * 3
    found = []
    for step in steps:
        end = SimpleNamespace(
            counts=SimpleNamespace(cascades={"reward": step}),
            pipeline=SimpleNamespace(counters=SimpleNamespace(total=SimpleNamespace(cascades={}))),
        )
        found.append(asyncio.run(alarm.after_step(cast(StepEnd, end))))
        before = CascadeAlarm({"reward": 0.1}, ["reward"])
        before.restore(json.loads(json.dumps(alarm.state())))
        alarm = before
    assert [one["alarm/cascade"] for one in found] == [1, 1, 1, 0, 0]
    assert found[-1]["cascade/reward/latest_error"] == pytest.approx(0.03)
    assert [one["cascade/reward/latest_steps"] for one in found] == [1, 2, 2, 2, 2]
