"""The alarms on judges and criteria: what raises them, over which verdicts, and when they are raised again."""

from __future__ import annotations

from collections import Counter

import pytest
from configs import judge_config

from grmpipe.config.judge import JudgeConfig, JudgeEntry
from grmpipe.pipeline.counters import JudgeCounts
from grmpipe.run.features.judge_alarms import DEAD_STEPS, FailingJudges, RubricAlarm
from grmpipe.types import Failed, JudgedCriterion, JudgeReport, Verdict

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


# -- criteria ----------------------------------------------------------------------------------------------------------


def judged(*verdicts: dict[str, float | None]) -> JudgeCounts:
    """The counts of reports on siblings: criterion for all prompts -> how far it is met."""
    counts = JudgeCounts()
    verdict = Verdict(rewards=(), score=1.0, breakdown={}, score_std=0.0, num_judgements=1)
    for met in verdicts:
        criteria = tuple(JudgedCriterion(name=name, met=one, shared=True) for name, one in met.items())
        counts.report(JudgeReport(verdict=verdict, criteria=criteria))
    return counts


DULL = judged({"kind": 1.0, "short": 1.0}, {"kind": 0.9, "short": 0.0}, {"kind": None, "short": 1.0})


def test_a_criterion_that_all_siblings_meet_for_many_steps_is_dead_and_said_so_once() -> None:
    alarm, said = RubricAlarm(), []
    for _ in range(DEAD_STEPS):
        resumed = RubricAlarm()
        resumed.restore(alarm.state())
        alarm = resumed
        said.append(alarm.check(DULL.rubric, JudgeCounts().rubric))
    assert said[:-1] == [[]] * (DEAD_STEPS - 1)
    assert len(said[-1]) == 1 and 'The criterion "kind" is dead: all siblings have met it for 50 steps' in said[-1][0]
    assert alarm.metrics() == {"judge/dead_criteria": 1.0} and alarm.check(DULL.rubric, DULL.rubric) == []
    assert alarm.check(JudgeCounts().rubric, DULL.rubric) == [] and alarm.metrics() == {"judge/dead_criteria": 1.0}
    alarm.check(judged({"kind": 0.0}).rubric, DULL.rubric)
    assert alarm.metrics() == {"judge/dead_criteria": 0.0}


def test_criteria_that_are_never_met_together_are_said_once() -> None:
    counts = judged(*[{"long": 1.0, "short": 0.0}, {"long": 0.0, "short": 1.0}] * 50).rubric
    alarm = RubricAlarm()
    assert alarm.check(counts, counts) == [
        'The criteria "long" and "short" are never met together (50 and 50 of 100 verdicts)'
    ]
    assert alarm.check(counts, counts + counts) == []


def test_runs_without_criteria_have_no_metric_of_them() -> None:
    assert (RubricAlarm().metrics(), JudgeCounts().rubric.metrics()) == ({}, {})
    assert judged({"kind": 0.5}).metrics(1.0)["criterion/kind/met_mean"] == 0.5
