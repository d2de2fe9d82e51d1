"""Whole runs with the judge monitor: the tiny GRM doesn't drift and isn't fooled, and an exceeded limit ends a run with
its own message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from grmpipe.run.errors import RunFailed
from grmpipe.run.features.judge_monitor import NUM_CANARIES

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
NOT_HERE = {"judge/.+/score_mean", "judge/failed_.+"}  # of several judges; of a judgement that fails


def test_frozen_judge_does_not_drift_during_a_run(small_run: Callable) -> None:
    files = small_run("judge_monitor.every=1", "train.num_steps=2")
    start, *_, last = files.lines("metrics")
    assert start["judge_monitor/canary_drift_abs"] == last["judge_monitor/canary_drift_abs"] == 0.0
    assert start["judge_monitor/attack_success_share"] <= 0.2
    assert last["alarm/canary_drift"] == last["alarm/fooled"] == 0.0
    assert files.summary["alarms"] == []
    shown = re.findall(r'name=~?\\"([^"]+)\\"', DASHBOARD.read_text(encoding="utf-8"))
    missing = {
        name for name in shown if not any(re.fullmatch(name, one) for line in files.lines("metrics") for one in line)
    }
    assert len(shown) > 20 and missing <= NOT_HERE, "deploy/grafana.json names metrics that no run has"
    canaries = files.lines("canaries")
    assert len(canaries) == NUM_CANARIES and all(line["prompt"]["messages"] for line in canaries)


def test_a_limit_stops_the_run_and_says_which(small_run: Callable) -> None:
    limit = "+judge_monitor.limits={short: {metric: response_length/mean, above: 1, action: stop}}"
    with pytest.raises(RunFailed, match=r"judge_monitor\.limits\.short: at step 1 response_length/mean is .* above 1"):
        small_run("judge_monitor.every=0", limit)
