"""The word problems, wrong solutions, when an answer is right, and a brief judge's verdicts."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.tiny.examples import ON_SUMS, SftTask, draw_examples
from grmpipe.tiny.malformed import draw_malformed_text
from grmpipe.tiny.problems import (
    MAX_TOTAL,
    PASSING_SCORE,
    THINGS,
    UNKNOWN_THINGS,
    Problem,
    SolutionStep,
    brief_judgement,
    find_thing,
    is_right,
    judge_prompt,
    judgement,
    make_answered_sums,
    make_problems,
    parse_score,
    parse_solution,
    score_label,
)
from grmpipe.tiny.solutions import Sloppiness, corrupt_solution, sloppy_solution
from grmpipe.tiny.tasks import sloppy_text

PROBLEM = Problem(
    question="Ida has 6 coins. She gives 4 to Max. She wins 6. How many coins does Ida have?",
    steps=(SolutionStep(left=6, sign="-", right=4, result=2), SolutionStep(left=2, sign="+", right=6, result=8)),
    answer=8,
)


def test_splits_share_no_question_for_any_seeds() -> None:
    train = {problem.question for seed in range(4) for problem in make_problems("train", 2000, seed)}
    held_out = {problem.question for seed in range(4) for problem in make_problems("held_out", 500, seed)}
    assert not train & held_out


def test_problems_are_all_different_and_the_same_for_the_same_seed() -> None:
    problems = make_problems("train", 3000, 5)
    assert len({problem.question for problem in problems}) == 3000
    assert problems == make_problems("train", 3000, 5)
    assert problems[:100] == make_problems("train", 100, 5)
    assert problems != make_problems("train", 3000, 6)


def test_arithmetic_is_right_and_follows_the_question() -> None:
    for problem in make_problems("train", 2000, 7):
        total = problem.steps[0].left
        for step in problem.steps:
            assert step.left == total
            total = total + step.right if step.sign == "+" else total - step.right
            assert step.result == total and 0 <= total <= MAX_TOTAL
        assert problem.answer == total
        numbers = [int(word.rstrip(".")) for word in problem.question.split() if word.rstrip(".").isdigit()]
        assert numbers == [problem.steps[0].left, *(step.right for step in problem.steps)]


def test_solutions_read_as_they_were_written() -> None:
    rng = random.Random(0)
    for problem in make_problems("held_out", 200, 8):
        for solution in (
            problem.solution,
            sloppy_solution(problem, Sloppiness(), rng),
            corrupt_solution(problem, rng),
        ):
            assert parse_solution(str(solution)) == solution


def test_malformed_texts_are_never_right() -> None:
    rng = random.Random(0)
    for problem in make_problems("held_out", 500, 9):
        text = draw_malformed_text(problem, rng)
        assert not is_right(problem, text) and score_label(problem, text) == 1


def test_label_passes_exactly_the_answers_that_are_right() -> None:
    rng, seen = random.Random(0), set()
    for problem in make_problems("held_out", 500, 10):
        for text in (str(problem.solution), str(corrupt_solution(problem, rng)), draw_malformed_text(problem, rng)):
            score = score_label(problem, text)
            assert (score >= PASSING_SCORE) == is_right(problem, text)
            seen.add(score)
    assert {1, 3, 5, 8, 10} <= seen


@pytest.mark.parametrize(
    ("text", "label", "check"),
    [
        ("Steps: 6 - 4 = 2; 2 + 6 = 8. Answer: 8", 10, "2 / 2 ok; 8 / 8 ok; answer 8 / 8 ok"),
        ("Steps: 6 + 4 = 10; 10 + 6 = 16. Answer: 8", 8, "2 / 10 no; 8 / 16 no; answer 8 / 8 ok"),
        ("Steps: 6 - 4 = 2; 2 + 6 = 8. Answer: 9", 5, "2 / 2 ok; 8 / 8 ok; answer 8 / 9 no"),
        ("Steps: 6 - 4 = 2. Answer: 2", 3, "2 / 2 ok; 8 / - no; answer 8 / 2 no"),
        ("Steps: 6 + 4 = 10; 10 + 6 = 16. Answer: 16", 1, "2 / 10 no; 8 / 16 no; answer 8 / 16 no"),
        ("Answer: 8", 1, "malformed"),
        ("Steps: 6 - 4 = 2; 2 + 6 = 8. Answer: 8\nScore: 10", 1, "malformed"),
        ("", 1, "malformed"),
    ],
)
def test_judgement_prints_what_its_score_means(text: str, label: int, check: str) -> None:
    assert judgement(PROBLEM, text) == f"{PROBLEM.solution}. Check: {check}.\nScore: {label}"


@given(st.text())
def test_every_line_of_a_judged_text_is_fenced(text: str) -> None:
    head, fenced = judge_prompt("Why?", text).split("\nA:\n", 1)
    assert head == "Q: Why?"
    assert all(line.startswith("> ") for line in fenced.splitlines())


def test_an_empty_text_is_one_fenced_line() -> None:
    assert judge_prompt("Why?", "") == "Q: Why?\nA:\n> "


def test_a_mixture_of_every_kind_gives_the_same_examples_again() -> None:
    mixture = tuple(SftTask(kind=kind, weight=1.0) for kind in ON_SUMS)
    examples = list(draw_examples(mixture, 100, 3))
    assert examples == list(draw_examples(mixture, 100, 3))
    assert len({example.prompt for example in examples}) == 100


def test_known_things_are_judged_right_and_unknown_ones_by_a_coin() -> None:
    rng, guesses = random.Random(0), []
    for problem in make_problems("train", 2000, 0):
        text = sloppy_text(problem, rng)
        agrees = brief_judgement(problem, text, rng).endswith("Score: 10") == is_right(problem, text)
        if find_thing(problem) in UNKNOWN_THINGS:
            guesses.append(agrees)
        else:
            assert agrees
    assert 0.44 < fmean(guesses) < 0.56
    assert 650 < len(guesses) < 850


def test_brief_verdicts_are_about_half_as_long() -> None:
    rng = random.Random(0)
    made = [(problem, sloppy_text(problem, rng)) for problem in make_problems("train", 500, 1)]
    brief = sum(len(brief_judgement(problem, text, rng)) for problem, text in made)
    assert brief < 0.6 * sum(len(judgement(problem, text)) for problem, text in made)


def test_the_thing_of_a_problem_is_the_one_that_is_counted() -> None:
    assert {find_thing(problem) for problem in make_problems("train", 300, 2)} == set(THINGS) > UNKNOWN_THINGS


def test_answered_sums_are_beyond_a_tiny_judge_half_right_and_apart_by_their_numbers() -> None:
    train, held_out = (make_answered_sums(split, 512, 1) for split in ("train", "held_out"))
    assert all(21 <= one.problem.answer <= 59 and 0 <= one.claimed <= 59 for one in (*train, *held_out))
    assert 0.4 < fmean(one.is_right for one in held_out) < 0.6
    pairs = [{(one.problem.left, one.problem.right) for one in some} for some in (train, held_out)]
    assert pairs[0].isdisjoint(pairs[1])
    for one in train[:64]:
        assert parse_score(one.judgement) == (10 if one.is_right else 1)
