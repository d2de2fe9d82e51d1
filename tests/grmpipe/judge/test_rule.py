"""What a rule holds for right."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.judge.rule import RuleJudge, contains_reference, is_right


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
    ],
)
def test_the_last_number_is_the_answer(text: str, reference: str) -> None:
    assert is_right(text, reference)


@pytest.mark.parametrize(
    ("text", "reference"),
    [("", "12"), ("twelve", "12"), ("112", "12"), ("12, or rather 13", "12"), ("-12", "12"), ("12.5", "12"),
     ("v12", "12"), ("1.2.12", "12"), ("١٢", "12"), ("9" * 100_000, "9")],
)  # fmt: skip
def test_another_number_or_none_is_wrong(text: str, reference: str) -> None:
    assert not is_right(text, reference)


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


@pytest.mark.parametrize(("reference", "said"), [(None, "p1 has no reference"), ("Paris", "contains_reference")])
def test_a_prompt_that_cannot_be_ruled_on_is_refused(bench: Any, reference: str | None, said: str) -> None:
    verdict = bench.run(RuleJudge("exact_answer").judge(bench.prompt(reference=reference), bench.rollout("12"))).verdict
    assert verdict.cause == "refused"
    assert said in verdict.detail
