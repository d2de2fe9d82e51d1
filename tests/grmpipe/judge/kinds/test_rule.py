"""What a rule accepts as right."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.judge.kinds.math_rule import is_installed, means_the_same
from grmpipe.judge.kinds.rule import RuleJudge, contains_reference, is_right
from grmpipe.models.types import ToolCall


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("12", "12"),
        ("Steps: 6 - 4 = 2; 2 + 10 = 12. Answer: 12", "12"),
        ("Answer: 12.", "12"),
        ("#### 12", "6 x 2 = 12\n#### 12"),
        (r"so \boxed{12}", "12.0"),
        ("that is $1,234.50", "1234.5"),
        ("it is -3", "-3"),
        ("it is \N{MINUS SIGN}3", "-3"),
        ("10-4", "4"),
        ("1,2,3", "3"),
        ("12 apples", "12"),
        ("1e5", "100000"),
        ("it is .5", "0.5"),
        ("about 1{,}000", "1000"),
        ("1\\,000", "1,000"),
        ("3/2", "1.5"),
        ("so 1 1/2", "3/2"),
        ("-3/4", "-0.75"),
        (r"\frac{1}{2}", "0.5"),
        (r"-\dfrac12", "-1/2"),
        (r"2\frac{1}{2}", "5/2"),
        ("12%", r"12\%"),
        ("7 cm^2", "7"),
        ("7 cm", r"7 \text{ cm}^2"),
        (r"90^\circ", "90"),
        ("about 60 km/h", "60"),
        ("it costs $5", "$5.00"),
        ("x = 5", "The answer is 5."),
        ("-  5", "-5"),
        ("Answer: - 5", "-5"),
        ("so x =  -\t5.", "-5"),
        (r"\boxed{- 5}", "-5"),
        (r"\boxed{x = -  5}", "- 5"),
        ("10 - 5", "5"),
        ("The answers:\n- 5", "5"),
        ("- -5 is what", "-5"),
    ],
)
def test_the_last_number_is_the_answer(text: str, reference: str) -> None:
    assert is_right(text, reference)


@pytest.mark.parametrize(
    ("text", "reference"),
    [("", "12"), ("twelve", "12"), ("112", "12"), ("12, or rather 13", "12"), ("-12", "12"), ("12.5", "12"),
     ("v12", "12"), ("1.2.12", "12"), ("١٢", "12"), ("9" * 100_000, "9"), ("3/2", "1/2"), ("3/2", "2"), ("2^10", "10"),
     (r"\frac{5}{3}", "1/3"), (r"\sqrt{3}", "3"), (r"\frac{\pi}{3}", "3"), ("3^x", "3"), ("3/4/2025", "2025"),
     (r"3\sqrt{2}", "3"), ("1/0", "0"), ("1e999999", "1"), ("The answer is 42. I checked it 3 times.", "42"),
     ("Answer: 12 1 13 14 15 72", "72"), ("1 000 000", "0"), ("-  5", "5"), (r"\boxed{x - 5}", "-5"),
     (r"\boxed{x - 5}", "5"), (r"\boxed{3 - 5}", "-5")],
)  # fmt: skip
def test_another_number_or_none_is_wrong(text: str, reference: str) -> None:
    assert not is_right(text, reference)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        (r"\boxed{42}. I checked it 3 times.", "42"),
        (r"First \boxed{3}, no: \boxed{42}, after 3 tries", "42"),
        (r"$$\boxed{\frac{5}{3}}$$", r"\frac{5}{3}"),
        (r"\boxed{x = 1{,}000 \text{ cm}^2}", "1000"),
        (r"\boxed{\$12.50}", "12.5"),
        (r"\boxed{12}", r"6 x 2 is 12 since 6 + 6 is \boxed{12}"),
    ],
)
def test_the_last_box_is_the_answer(text: str, reference: str) -> None:
    assert is_right(text, reference)


@pytest.mark.parametrize(
    "box",
    ["", r"\frac{5}{3}", "(4, 9)", "2^9", r"\sqrt{9}", "9x", "9, 10", "-9", r"9\pi", "sin 9", "9 to 10", "9 + 0"],
)
def test_a_box_that_holds_anything_but_the_number_is_wrong(box: str) -> None:
    assert not is_right(f"It is 9. \\boxed{{{box}}} So 9.", "9")
    assert not is_right(f"It is 9. \\boxed{{{box}", "9")


@pytest.mark.parametrize(
    "reference",
    ["(3, 9)", "3 and 9", "3, 9", "x = 3 or x = 9", "6 x 2 = 12", r"\sqrt{3}", "2^10", r"3\pi", "5x", "x", "", "#### ",
     "1/0", r"\boxed{3} and \boxed{9}", r"\boxed{(3, 9)}", "#### 3 9", "Answer: 3 9", "sin 30", "1:2",
     "[0, 1]", "10:30", "3 + 2i"],
)  # fmt: skip
def test_a_reference_that_is_not_one_number_is_refused_and_the_way_out_is_named(reference: str) -> None:
    with pytest.raises(ValueError, match=r"one number.*judge\.rule=math_verify.*judge\.rule=contains_reference"):
        is_right("12", reference)


@pytest.mark.parametrize(
    "filling", ["9", "9,", "1 ", "1/", "{", "\\frac{1}", "\\boxed{", "\\boxed{9}", "9 cm^2", "^", " "]
)
def test_an_answer_is_read_in_linear_time(filling: str) -> None:
    started_s = time.process_time()
    for begins in ("", "1", "\\boxed{", "\\frac{"):
        assert not is_right(f"{begins}{filling * 20_000}x", "12")
    assert time.process_time() - started_s < 2


@given(text=st.text(), number=st.integers())
def test_what_stands_before_the_answer_does_not_matter(text: str, number: int) -> None:
    assert is_right(f"{text}\nAnswer: {number}", str(number))
    assert not is_right(f"{text}\nAnswer: {number}", str(number + 1))


def test_a_reference_stands_as_whole_words_in_any_case() -> None:
    assert contains_reference("It is  the\nEIFFEL tower!", "the Eiffel Tower")
    assert not contains_reference("There is nothing yesterday", "no")
    assert not contains_reference("", "no")
    with pytest.raises(ValueError, match="empty"):
        contains_reference("anything", " \n")


@pytest.mark.parametrize(("text", "score", "reward"), [("Answer: 12", 10, 1.0), ("Answer: 13", 1, 0.0)])
def test_right_is_10_and_1_wrong_is_1_and_0(bench: Any, text: str, score: int, reward: float) -> None:
    verdict = bench.run(RuleJudge("exact_answer").judge(bench.prompt(), bench.rollout(text))).verdict
    assert (verdict.score, verdict.outcome, verdict.breakdown) == (score, reward, {"rule": reward})


SOURCE = """
import sys

import numpy as np
import torch

GIVEN = {
    "partial": 0.54, "float32": np.float32(0.5), "bool_": np.bool_(True), "tensor": torch.tensor(0.25), "int": 1,
    "no": False, "None": None, "text": "0.5", "ten": 10, "negative": -0.1, "nan": float("nan"), "huge": 10**400,
    "array": np.zeros(1),
}


def graded(text, reference):
    if text == "crash":
        return {}[text]
    if text == "leave":
        sys.exit(3)
    if reference == "unknown":
        raise ValueError("an unknown reference")
    return GIVEN[text]
"""


@pytest.fixture
def own_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_rules.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "users_rules.graded"


@pytest.mark.parametrize(
    ("text", "reward"), [("partial", 0.54), ("float32", 0.5), ("bool_", 1), ("tensor", 0.25), ("int", 1), ("no", 0)]
)
def test_a_grade_is_the_reward_and_a_share_of_the_scale(bench: Any, own_rule: str, text: str, reward: float) -> None:
    verdict = bench.run(RuleJudge(own_rule).judge(bench.prompt(), bench.rollout(text))).verdict
    assert (verdict.outcome, verdict.breakdown) == (reward, {"rule": reward})
    assert verdict.score == pytest.approx(1 + 9 * reward)
    assert type(verdict.outcome) is type(verdict.score) is float


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, r"returned .*; return True or False, or a number from 0 to 1$")
          for text in ("None", "text", "ten", "negative", "nan", "huge", "array")),
        ("crash", r"raised KeyError: 'crash' \(.*users_rules\.py:\d+\)$"),
        ("leave", r"raised SystemExit: 3 \(.*users_rules\.py:\d+\)$"),
    ],
)  # fmt: skip
def test_what_is_no_grade_is_a_failure_that_names_key_function_and_line(
    bench: Any, own_rule: str, text: str, said: str
) -> None:
    judge = RuleJudge(own_rule, key="judges.mine")
    verdict = bench.run(judge.judge(bench.prompt(), bench.rollout(text))).verdict
    assert verdict.cause == "broken"
    assert re.search(rf"judges\.mine\.rule: users_rules\.graded \(.*users_rules\.py:\d+\) {said}", verdict.detail)


def test_a_value_error_of_a_rule_says_that_the_prompt_can_not_be_decided(bench: Any, own_rule: str) -> None:
    verdict = bench.run(RuleJudge(own_rule).judge(bench.prompt(reference="unknown"), bench.rollout("no"))).verdict
    assert verdict.cause == "refused" and "an unknown reference" in verdict.detail


@pytest.mark.parametrize(("reference", "said"), [(None, "p1 has no reference"), ("Paris", "contains_reference")])
def test_a_prompt_that_cannot_be_ruled_on_is_refused(bench: Any, reference: str | None, said: str) -> None:
    verdict = bench.run(RuleJudge("exact_answer").judge(bench.prompt(reference=reference), bench.rollout("12"))).verdict
    assert verdict.cause == "refused"
    assert said in verdict.detail


@pytest.mark.skipif(not is_installed(), reason='needs math-verify: pip install "grmpipe[math]"')
def test_mathematics_is_compared_by_its_meaning() -> None:
    assert means_the_same(r"so \boxed{\sqrt{12}}", r"2\sqrt{3}")
    assert means_the_same(r"\boxed{(3, 9)}", "(3, 9)")
    assert means_the_same(r"\boxed{\frac{1}{2}}", "0.5")
    assert not means_the_same(r"\boxed{(4, 9)}", "(3, 9)")
    assert not means_the_same(r"\boxed{9^{9^{9^9}}}", "12")
    assert not means_the_same("", "12")
    assert means_the_same(r"\boxed{\infty}", "infinity")
    assert means_the_same(r"\boxed{yxz}", "xyz") and means_the_same(r"\boxed{B}", "B")
    assert means_the_same(r"\boxed{\text{even}}", r"\text{even}")
    for text in ("", "Paris", "no solution", "yes", "The Eiffel Tower."):
        with pytest.raises(ValueError, match=r"contains no mathematics; type judge\.rule=contains_reference"):
            means_the_same(r"\boxed{pairs}", text)


CALL = ToolCall(name="add", arguments={"a": 3, "b": 12})


@pytest.mark.parametrize(
    ("texts", "right"),
    [
        (("add(3, 12)", "Answer: 12"), True),
        (("Answer: 12", "Answer: 13"), False),
        (("Answer: 12", "add(3, 4)"), False),
    ],
)
def test_the_answer_of_an_episode_is_its_last_turn(bench: Any, texts: tuple[str, ...], right: bool) -> None:
    turns = tuple(bench.rollout(text).turns[0] for text in texts)
    episode = replace(bench.rollout(""), turns=turns)
    verdict = bench.run(RuleJudge("exact_answer").judge(bench.prompt(), episode)).verdict
    assert verdict.outcome == float(right)


@pytest.mark.parametrize(("status", "right"), [("truncated", False), ("finished", True)])
def test_a_call_that_the_end_of_turns_cut_off_is_no_answer_and_one_that_ended_the_episode_is(
    bench: Any, status: Any, right: bool
) -> None:
    called = replace(bench.rollout("submit(12)").turns[0], tool_calls=(CALL,))
    episode = replace(bench.rollout(""), turns=(called,), status=status)
    verdict = bench.run(RuleJudge("exact_answer").judge(bench.prompt(), episode)).verdict
    assert verdict.outcome == float(right)
