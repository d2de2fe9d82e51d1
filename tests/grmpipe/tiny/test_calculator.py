"""Calls of a calculator: episodes, views, and the judgements of a perfect judge."""

from __future__ import annotations

import random

from grmpipe.tiny.calculator import (
    CORRUPTIONS,
    CalculatorCall,
    Carelessness,
    Episode,
    answers_right,
    careless_episode,
    check_calls,
    corrupt_episode,
    judgement_of_calls,
    parse_view,
    right_episode,
    score_of_calls,
)
from grmpipe.tiny.malformed import draw_malformed_view
from grmpipe.tiny.problems import LARGE, Problem, SolutionStep, make_problems

PROBLEM = Problem(
    question="Ida has 32 coins. She gives 9 to Max. She wins 6. How many coins does Ida have?",
    steps=(SolutionStep(left=32, sign="-", right=9, result=23), SolutionStep(left=23, sign="+", right=6, result=29)),
    answer=29,
)
RIGHT = "> sub( 32, 9)\n| = 23\n> add( 23, 6)\n| = 29\n> Answer: 29"
MISREAD = "> add( 32, 9)\n| = 41\n> add( 41, 6)\n| = 47\n> Answer: 47"


def test_a_view_shows_each_call_with_its_result_and_then_the_answer() -> None:
    assert right_episode(PROBLEM).view == RIGHT


def test_a_view_reads_as_it_was_written() -> None:
    rng = random.Random(0)
    for problem in make_problems("train", 300, 0, LARGE):
        for episode in (careless_episode(problem, Carelessness(), rng), corrupt_episode(problem, rng)):
            assert parse_view(episode.view) == episode


def test_no_other_text_reads_as_a_view() -> None:
    rng = random.Random(0)
    for problem in make_problems("train", 300, 1, LARGE):
        view = draw_malformed_view(problem, rng)
        assert parse_view(view) is None and not answers_right(problem, view)
        assert judgement_of_calls(problem, view) == "Check: malformed.\nScore: 1"


def test_judgement_shows_each_right_sum_next_to_the_called_one() -> None:
    assert judgement_of_calls(PROBLEM, RIGHT) == (
        "Check: 32 - 9 / 32 - 9 ok; 23 + 6 / 23 + 6 ok; answer 29 / 29 ok.\nScore: 10"
    )
    assert judgement_of_calls(PROBLEM, MISREAD) == (
        "Check: 32 - 9 / 32 + 9 no; 41 + 6 / 41 + 6 ok; answer 47 / 47 ok.\nScore: 3"
    )


def test_a_mistake_counts_once_and_missing_or_further_calls_are_no_right_ones() -> None:
    first, second = CalculatorCall(name="sub", left=32, right=9), CalculatorCall(name="add", left=23, right=6)
    assert [one.ok for one in check_calls(PROBLEM, Episode(calls=(first,), answer=23))] == [True, False]
    assert [one.ok for one in check_calls(PROBLEM, Episode(calls=(first, second, second), answer=29))] == [
        True,
        True,
        False,
    ]
    old = CalculatorCall(name="add", left=32, right=6)
    assert [one.ok for one in check_calls(PROBLEM, Episode(calls=(first, old), answer=38))] == [True, False]


def test_only_episodes_without_a_mistake_pass_and_they_answer_right() -> None:
    rng = random.Random(0)
    for problem in make_problems("train", 500, 2, LARGE):
        assert score_of_calls(problem, right_episode(problem).view) == 10
        view = corrupt_episode(problem, rng).view
        assert score_of_calls(problem, view) <= 5 or answers_right(problem, view)


def test_every_corruption_can_make_the_answer_wrong() -> None:
    rng, problems = random.Random(0), make_problems("train", 50, 3, LARGE)
    for corrupt in CORRUPTIONS:
        assert not all(answers_right(one, corrupt(right_episode(one), rng).view) for one in problems)


def test_large_problems_go_to_59_and_share_no_question_between_splits() -> None:
    train, held_out = make_problems("train", 2000, 0, LARGE), make_problems("held_out", 300, 1, LARGE)
    assert {problem.question for problem in train}.isdisjoint(problem.question for problem in held_out)
    totals = [step.result for problem in train for step in problem.steps]
    assert min(totals) >= 0 and 50 < max(totals) <= 59
