"""Comparisons, the second kind of task of tiny models."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from grmpipe.tiny.comparisons import (
    MISREAD,
    Comparison,
    compares_right,
    comparison_judgement,
    corrupt_comparison,
    draw_training_comparison,
    make_comparisons,
    sloppy_comparison,
)
from grmpipe.tiny.examples import draw_examples, to_messages
from grmpipe.tiny.problems import assign_split
from grmpipe.tiny.recipes import POLICY_KINDS

COMPARISON = Comparison(
    question="Ida has 4 pens. Max has 9 pens. How many pens does the one with more have?", numbers=(4, 9)
)


def test_comparisons_of_the_splits_share_no_question() -> None:
    train, held_out = make_comparisons("train", 2000, 0), make_comparisons("held_out", 500, 1)
    assert not {one.question for one in train} & {one.question for one in held_out}
    assert train[:50] == make_comparisons("train", 50, 0)
    assert len({one.question for one in train}) == 2000


def test_models_are_taught_on_no_held_out_comparison() -> None:
    rng = random.Random(0)
    assert {assign_split(draw_training_comparison(rng).question) for _ in range(300)} == {"train"}


def test_the_answer_is_the_largest_number_of_the_question() -> None:
    for one in make_comparisons("train", 200, 2):
        numbers = [int(word) for word in one.question.split() if word.isdigit()]
        assert tuple(numbers) == one.numbers and one.answer == max(numbers)
        assert compares_right(one, one.solution)


def test_a_sloppy_writer_is_mostly_wrong_and_a_careful_one_right() -> None:
    made = make_comparisons("train", 2000, 3)
    sloppy = fmean(compares_right(one, sloppy_comparison(one, MISREAD, random.Random(i))) for i, one in enumerate(made))
    careful = fmean(compares_right(one, sloppy_comparison(one, 0.0, random.Random(i))) for i, one in enumerate(made))
    assert 0.2 < sloppy < 0.5 and careful > 0.8


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("More: 4; 9. Answer: 9", "Check: answer 9 / 9 ok.\nScore: 10"),
        ("More: 4; 4. Answer: 4", "Check: answer 9 / 4 no.\nScore: 1"),
        ("Answer: 9", "Check: malformed.\nScore: 1"),
        ("More: 4; 9. Answer: 9 ok", "Check: malformed.\nScore: 1"),
    ],
)
def test_a_judgement_solves_the_comparison_then_compares_the_answers(text: str, verdict: str) -> None:
    assert comparison_judgement(COMPARISON, text) == f"More: 4; 9. Answer: 9. {verdict}"


def test_corrupted_comparisons_are_mostly_wrong() -> None:
    rng = random.Random(0)
    made = [(one, corrupt_comparison(one, rng)) for one in make_comparisons("train", 500, 4)]
    assert fmean(compares_right(one, text) for one, text in made) < 0.25


def test_a_curriculum_of_two_kinds_has_as_many_of_each_as_their_weights_say() -> None:
    prompts = [to_messages(one)[0].text for one in draw_examples(POLICY_KINDS.mixture, 400, 0)]
    assert 0.4 < fmean("the one with more" in prompt for prompt in prompts) < 0.6
    assert {assign_split(prompt) for prompt in prompts} == {"train"}
