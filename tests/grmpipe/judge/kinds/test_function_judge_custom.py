"""A user's own judge is loaded by its dotted path, or refused with a message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from configs import judge_config

from grmpipe.config.judge import JudgeEntry
from grmpipe.judge.kinds.function_judge import load_custom_judge
from grmpipe.judge.pointwise_adapter import judge_alone
from grmpipe.types import Failed, JudgeReport, Verdict

SOURCE = """
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.judge.kinds.rule import RuleJudge

class ByRule:
    def __init__(self, rule="exact_answer"):
        self._inner = RuleJudge(rule)
    async def judge(self, prompt, rollout, priority=0):
        return await self._inner.judge(prompt, rollout, priority)

class OfGroups(PointwiseAdapter):
    def __init__(self):
        super().__init__(ByRule())

class NoJudge:
    pass

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_own_judges.py").write_text(SOURCE)
    (tmp_path / "users_broken_judges.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "users_own_judges"


@pytest.mark.parametrize("name", ["ByRule", "OfGroups"])
def test_custom_judge_judges_rollouts_or_opens_sessions(bench: Any, module: str, name: str) -> None:
    judge = load_custom_judge(judge_config(kind="custom", target=f"{module}.{name}"))
    assert bench.run(judge_alone(judge, bench.prompt(), bench.rollout("Answer: 12"))).verdict.outcome == 1


def test_custom_judge_is_made_with_its_options(bench: Any, module: str) -> None:
    options = {"rule": "contains_reference"}
    judge = load_custom_judge(judge_config(kind="custom", target=f"{module}.ByRule", options=options))
    verdict = bench.run(judge_alone(judge, bench.prompt(reference="a dozen"), bench.rollout("a dozen"))).verdict
    assert verdict.outcome == 1


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("ByRule", {}, r"^custom\.target: 'ByRule' is not a dotted path"),
        ("no_such_package.Judge", {}, r"^custom\.target: no_such_package can't be imported \(ModuleNotFoundError"),
        (
            "users_broken_judges.Judge",
            {},
            r"^custom\.target: users_broken_judges can't be .*nowhere_to_be_found",
        ),
        ("users_own_judges.ByRuler", {}, r"^custom\.target: the module users_own_judges has no ByRuler"),
        ("users_own_judges.number", {}, r"^custom\.target: users_own_judges.number is not a class"),
        ("users_own_judges.NoJudge", {}, r"^custom\.target: users_own_judges.NoJudge is not a judge: it needs"),
        (
            "users_own_judges.ByRule",
            {"ruler": "x"},
            r"^custom\.options: users_own_judges.ByRule can't be constructed with .*ruler",
        ),
    ],
)
def test_an_object_that_is_no_judge_is_refused_by_its_key(module: str, target: str, options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_custom_judge(judge_config(kind="custom", target=target, options=options))


OF_TYPES = """
import sys

import numpy as np

from grmpipe.config.judge import Scale
from grmpipe.judge.verdict import outcome
from grmpipe.judge.votes import mean, voted
from grmpipe.types import Failed, JudgeReport, JudgeTask, Verdict


class Typed:
    def __init__(self, what):
        self.what = what

    async def judge(self, prompt, rollout, priority=0):
        verdict = voted("mine", rollout, [7], mean, Scale(low=1, high=10))
        if self.what == "crash":
            return {}["x"]
        if self.what == "leave":
            sys.exit(3)
        return {
            "number": 0.5,
            "nothing": None,
            "verdict": verdict,
            "no verdict": JudgeReport(verdict=0.5),
            "no rewards": JudgeReport(verdict=Verdict(rewards=(), score=1, breakdown={}, score_std=0,
                num_judgements=1)),
            "text": JudgeReport(verdict=Verdict(rewards=outcome(rollout, "1"), score=1, breakdown={}, score_std=0,
                num_judgements=1)),
            "cause": JudgeReport(verdict=Failed(stage="judge", cause="tired", attempts=1)),
            "numpy": JudgeReport(verdict=Verdict(rewards=outcome(rollout, np.float32(0.5)), score=np.int64(3),
                breakdown={"a": np.float32(0.5)}, score_std=0, num_judgements=1)),
            "fine": JudgeReport(verdict=verdict),
        }[self.what]


class Grouped:
    def __init__(self, what):
        self.what = what

    def open(self, prompt, group_id, size):
        return 0.5 if self.what == "no session" else self

    def begin(self):
        return 0.5 if self.what == "no tasks" else ()

    def add(self, rollout):
        self.rollout = rollout
        return [JudgeTask(members=(rollout.sibling,))]

    async def judge(self, judge_task, priority=0):
        if self.what == "crash":
            return {}["x"]
        report = await Typed("fine").judge(None, self.rollout)
        return {"no mapping": report, "other": {7: report}, "number": {0: 0.5}, "fine": {0: report}}[self.what]
"""


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_typed_judges.py").write_text(OF_TYPES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "users_typed_judges"


def judged(bench: Any, target: str, what: str) -> JudgeReport:
    judge = load_custom_judge(JudgeEntry.of(judge_config(kind="custom", target=target, options={"what": what}), "mine"))
    return bench.run(judge_alone(judge, bench.prompt(), bench.rollout("Answer: 12")))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("number", r"returned 0\.5; return a JudgeReport, such as JudgeReport\(verdict=voted\('mine', rollout, \[7\]"),
        ("nothing", r"returned None; return a JudgeReport, such as"),
        ("verdict", r"returned Verdict\(.*; return a JudgeReport, such as"),
        ("no verdict", r"the verdict 0\.5; return a Verdict or a Failed in it, such as"),
        ("no rewards", r"without rewards; return for example"),
        ("text", r"returned the reward '1', and it must be a number"),
        ("cause", r"the cause 'tired'; known: .*unparseable"),
    ],
)
def test_a_return_value_that_is_no_report_is_refused_by_key_function_and_line_with_an_example(
    bench: Any, typed: str, what: str, said: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"^judges\.mine\.custom\.target: {typed}\.Typed\.judge \(.*\.py:\d+\) .*{said}"
    ):
        judged(bench, f"{typed}.Typed", what)


@pytest.mark.parametrize(("what", "said"), [("crash", "KeyError: 'x'"), ("leave", "SystemExit: 3")])
def test_a_judge_that_raises_has_failed_and_says_where(bench: Any, typed: str, what: str, said: str) -> None:
    verdict = judged(bench, f"{typed}.Typed", what).verdict
    assert isinstance(verdict, Failed) and verdict.cause == "broken"
    assert re.search(
        rf"judges\.mine\.custom\.target: {typed}\.Typed\.judge \(.*\) raised {said} \(.*:\d+\)", verdict.detail
    )


def test_numbers_of_numpy_are_plain_in_a_verdict(bench: Any, typed: str) -> None:
    verdict = judged(bench, f"{typed}.Typed", "numpy").verdict
    assert isinstance(verdict, Verdict)
    assert (verdict.outcome, verdict.score, verdict.breakdown) == (0.5, 3.0, {"a": 0.5})
    assert {type(verdict.score), type(verdict.outcome), type(verdict.breakdown["a"])} == {float}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "no session",
            r"Grouped\.open \(.*\) returned 0\.5; return a JudgeSession, with the methods begin, add and judge",
        ),
        ("no tasks", r"Grouped\.begin \(.*\) returned 0\.5; return a tuple of JudgeTask"),
        ("no mapping", r"Grouped\.judge \(.*\) returned JudgeReport.*; return a JudgeReport by the number"),
        ("other", r"Grouped\.judge \(.*\) returned {7: .*; return a JudgeReport by the number"),
        ("number", r"Grouped\.judge \(.*\) returned 0\.5; return a JudgeReport, such as"),
    ],
)
def test_a_session_of_the_users_own_has_the_same_door(bench: Any, typed: str, what: str, said: str) -> None:
    assert judged(bench, f"{typed}.Grouped", "fine").verdict.score == 7
    with pytest.raises(ValueError, match=rf"^judges\.mine\.custom\.target: {typed}\.{said}"):
        judged(bench, f"{typed}.Grouped", what)


def test_an_error_of_a_session_keeps_its_type_and_says_where(bench: Any, typed: str) -> None:
    with pytest.raises(KeyError) as error:
        judged(bench, f"{typed}.Grouped", "crash")
    assert re.search(
        rf"^in judges\.mine\.custom\.target: {typed}\.Grouped\.judge \(.*, .*:\d+:$", error.value.__notes__[0]
    )
