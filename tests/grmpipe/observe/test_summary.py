"""summary.json: its documented fields, plain JSON, atomic; the objective by its path."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from grmpipe.observe.summary import EvalSummary, GroupsSummary, JudgingSummary, Summary, lookup, write_summary

SUMMARY = Summary(
    status="completed",
    steps=80,
    versions={"policy": 80, "grm": 0},
    wall_s=81.5,
    eval=EvalSummary(
        initial={"true_accuracy": 0.29, "true_accuracy_greedy": 0.31, "grm_score": 4.3},
        final={"true_accuracy": 0.73, "true_accuracy_greedy": 0.81, "grm_score": math.nan},
    ),
    busy_s={"policy": 20.0, "grm": 40.0, "learner": 15.0},
    judging=JudgingSummary(asked=130, counted=128, failed=Counter(timeout=2), tokens=5000),
    groups=GroupsSummary(submitted=20, trained=16, dropped=Counter({"stale": 3}), in_flight=1),
    max_staleness_trained=1,
)


def test_the_file_holds_the_agreed_fields(tmp_path: Path) -> None:
    SUMMARY.with_objective("eval.final.true_accuracy").write(tmp_path / "summary.json")
    record = json.loads((tmp_path / "summary.json").read_text())
    assert list(record) == [
        "status", "steps", "versions", "wall_s", "objective", "eval", "busy_s", "judging", "watching", "teaching",
        "envs", "groups", "voided_by_resumes", "serving", "max_staleness_trained", "sync", "engines_replaced",
        "restarts", "moves", "bottleneck", "alarms", "changes", "journal_failures", "run_id",
    ]  # fmt: skip
    assert record["objective"] == 0.73
    assert record["judging"] == {
        "asked": 130, "counted": 128, "forced_verdicts": 0, "asked_verdicts": 0, "asked_verdicts_read": 0,
        "tool_calls": 0, "called_tools": 0,
        "failed": {"timeout": 2}, "tokens": 5000, "saved_by_early_stop": 0,
        "early_stop_error": None, "aborted_tasks": 0, "voided_verdicts": 0,
        "by_judge": {}, "cascades": {}, "requests": {}, "requests_by_model": {}, "spending": None,
    }  # fmt: skip
    assert record["groups"] == {"submitted": 20, "trained": 16, "dropped": {"stale": 3}, "in_flight": 1}
    assert record["eval"]["final"]["grm_score"] is None
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_only_a_failed_run_says_why_and_must() -> None:
    failed = Summary(status="failed", steps=3, versions={}, wall_s=1.0, failure="the judge failed 60 % of its requests")
    assert failed.to_json()["failure"] == "the judge failed 60 % of its requests"
    with pytest.raises(AssertionError):
        Summary(status="failed", steps=3, versions={}, wall_s=1.0)


@pytest.mark.parametrize(
    ("path", "value"),
    [("eval.final.true_accuracy", 0.73), ("steps", 80.0), ("groups.dropped.stale", 3.0), ("busy_s.grm", 40.0)],
)
def test_any_number_can_be_the_objective(path: str, value: float) -> None:
    assert lookup(SUMMARY, path) == value


@pytest.mark.parametrize("path", ["eval.final.accuracy", "status", "eval", "eval.final.grm_score", ""])
def test_a_path_without_a_number_names_those_there_are(path: str) -> None:
    with pytest.raises(ValueError, match=r"objective: no number at .*eval\.final\.true_accuracy, .*busy_s\.policy"):
        lookup(SUMMARY, path)


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ValueError, match=r"did you mean eval\.final\.true_accuracy\?"):
        lookup(SUMMARY, "eval.final.true_acuracy")


def test_a_summary_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        SUMMARY.write(tmp_path / "missing" / "summary.json")


@pytest.mark.parametrize(("failure", "lines"), [(None, 1), ("the disk is full, said the learner", 2)])
def test_a_summary_that_cannot_be_written_fails_the_run_behind_the_first_cause(
    tmp_path: Path, failure: str | None, lines: int
) -> None:
    (tmp_path / "summary.json.tmp").symlink_to("/dev/full")
    run = replace(SUMMARY, status="failed" if failure else "completed", failure=failure)
    told = write_summary(run, tmp_path / "summary.json")
    assert told.status == "failed"
    assert told.failure is not None
    assert told.failure.splitlines() == [
        *([failure] if failure else []), f"{tmp_path}/summary.json could not be written: No space left on device"
    ]  # fmt: skip
    assert len(told.failure.splitlines()) == lines
    assert write_summary(run, tmp_path / "other.json") is run
