"""The alarm on each of several judges: which rate raises it, over which verdicts, and when it is raised again."""

from __future__ import annotations

from collections import Counter

import pytest
from configs import judge_config

from grmpipe.config.judge import JudgeConfig, JudgeEntry
from grmpipe.pipeline.counters import JudgeCounts
from grmpipe.run.features.judge_alarms import FailingJudges
from grmpipe.types import Failed, JudgeReport

FAR = JudgeEntry.of(judge_config(max_failure_rate=0.5), "far")


@pytest.fixture(autouse=True)
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grmpipe.run.features.judge_alarms.VERDICTS_WINDOW", 16)


def step(verdicts: int, failed: int) -> dict[str, JudgeCounts]:
    return {"far": JudgeCounts(verdicts=verdicts, failed_verdicts=failed, failed=Counter(died=failed))}


def alarms(*steps: tuple[int, int]) -> list[int]:
    """The number of alarms at each step of (verdicts, failures)."""
    failing = FailingJudges({"judge": JudgeConfig(), "far": FAR})
    return [len(failing.check(step(*one))) for one in steps]


def test_an_alarm_names_the_judge_its_rate_and_the_causes() -> None:
    (alarm,) = FailingJudges({"judge": JudgeConfig(), "far": FAR}).check(step(4, 12))
    assert "The judge far fails: 12 of its last 16 verdicts (75%; judges.far.max_failure_rate=0.5)" in alarm
    assert "12 died" in alarm


def test_an_alarm_is_raised_again_only_after_the_rate_was_lower() -> None:
    assert alarms((0, 16), (0, 16), (16, 0), (0, 16)) == [1, 0, 0, 1]


def test_the_rate_is_over_the_latest_verdicts_and_a_quarter_of_them_is_enough() -> None:
    assert alarms((0, 3)) == [0]
    assert alarms((0, 2), (0, 2)) == [0, 1]
    assert alarms((1600, 0), (0, 16)) == [0, 1]


def test_single_judge_has_only_the_alarm_of_the_breaker() -> None:
    failing = FailingJudges({"far": FAR})
    assert (failing.check(step(0, 64)), failing.metrics()) == ([], {})


@pytest.mark.parametrize(("cause", "failed"), [("died", 1), ("undecided", 0)])
def test_an_abstention_is_no_failure(cause: str, failed: int) -> None:
    counts = JudgeCounts()
    counts.report(JudgeReport(verdict=Failed(stage="judge", cause=cause, attempts=1, detail="")))  # type: ignore[arg-type]
    assert counts.failed_verdicts == failed
