"""The second kind of task, and the sets of problems by name."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from models.tiny.comparisons import (
    MISREAD,
    Comparison,
    compares_right,
    comparison_judgement,
    corrupted_comparison,
    draw_training_comparison,
    make_comparisons,
    sloppy_comparison,
)
from models.tiny.problem_sets import PROBLEM_SETS, make_tasks
from models.tiny.problems import split_of

COMPARISON = Comparison(
    question="Ida has 4 pens. Max has 9 pens. How many pens does the one with more have?", numbers=(4, 9)
)


def test_comparisons_of_the_splits_share_no_question() -> None:
    train, held_out = make_comparisons("train", 2000, 0), make_comparisons("held_out", 500, 1)
    assert not {one.question for one in train} & {one.question for one in held_out}
    assert train[:50] == make_comparisons("train", 50, 0)
    assert len({one.question for one in train}) == 2000


def test_lessons_hold_no_held_out_comparison() -> None:
    rng = random.Random(0)
    assert {split_of(draw_training_comparison(rng).question) for _ in range(300)} == {"train"}


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
    ("text", "said"),
    [
        ("More: 4; 9. Answer: 9", "Check: answer 9 / 9 ok.\nScore: 10"),
        ("More: 4; 4. Answer: 4", "Check: answer 9 / 4 no.\nScore: 1"),
        ("Answer: 9", "Check: malformed.\nScore: 1"),
        ("More: 4; 9. Answer: 9 ok", "Check: malformed.\nScore: 1"),
    ],
)
def test_judgement_of_a_comparison(text: str, said: str) -> None:
    assert comparison_judgement(COMPARISON, text) == f"More: 4; 9. Answer: 9. {said}"


def test_corrupted_comparisons_are_mostly_wrong() -> None:
    rng = random.Random(0)
    made = [(one, corrupted_comparison(one, rng)) for one in make_comparisons("train", 500, 4)]
    assert fmean(compares_right(one, text) for one, text in made) < 0.25


@pytest.mark.parametrize("name", PROBLEM_SETS)
def test_a_problem_set_has_as_many_tasks_as_asked_for_and_always_the_same(name: str) -> None:
    tasks = make_tasks(name, 33, 0)
    assert len({task.question for task in tasks}) == 33
    assert tasks == make_tasks(name, 33, 0)
    assert {split_of(task.question) for task in tasks} == {"held_out" if "held_out" in name else "train"}


def test_two_kinds_come_in_turn() -> None:
    assert [task.kind for task in make_tasks("two_kinds", 5, 0)] == ["arithmetic", "comparison"] * 2 + ["arithmetic"]
