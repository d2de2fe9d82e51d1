"""A user's own judge is loaded by its dotted path, or refused with a message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grmpipe.config.judge import JudgeConfig
from grmpipe.judge.custom import load_custom_judge
from grmpipe.judge.pointwise_adapter import judge_alone

SOURCE = """
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.judge.rule import RuleJudge

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
def test_it_judges_rollouts_or_opens_hearings(bench: Any, module: str, name: str) -> None:
    judge = load_custom_judge(JudgeConfig(kind="custom", target=f"{module}.{name}"))
    assert bench.run(judge_alone(judge, bench.prompt(), bench.rollout("Answer: 12"))).verdict.outcome == 1


def test_it_is_made_with_its_options(bench: Any, module: str) -> None:
    options = {"rule": "contains_reference"}
    judge = load_custom_judge(JudgeConfig(kind="custom", target=f"{module}.ByRule", options=options))
    verdict = bench.run(judge_alone(judge, bench.prompt(reference="a dozen"), bench.rollout("a dozen"))).verdict
    assert verdict.outcome == 1


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("ByRule", {}, r"^target: 'ByRule' is not a dotted path"),
        ("no_such_package.Judge", {}, r"^target: no_such_package can't be imported \(ModuleNotFoundError"),
        ("users_broken_judges.Judge", {}, r"^target: users_broken_judges can't be imported .*nowhere_to_be_found"),
        ("users_own_judges.ByRuler", {}, r"^target: the module users_own_judges has no ByRuler"),
        ("users_own_judges.number", {}, r"^target: users_own_judges.number is not a class"),
        ("users_own_judges.NoJudge", {}, r"^target: users_own_judges.NoJudge is not a judge: it needs"),
        (
            "users_own_judges.ByRule",
            {"ruler": "x"},
            r"^options: users_own_judges.ByRule can't be constructed with .*ruler",
        ),
    ],
)
def test_what_is_no_judge_is_refused_by_its_key(module: str, target: str, options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_custom_judge(JudgeConfig(kind="custom", target=target, options=options))
