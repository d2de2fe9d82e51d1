"""The rule judge of benchmarks/evidence_credit.py quotes the calls that it means; rollouts are counted on a line."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # a benchmark imports its neighbours like a script

from evidence_credit import GROUPS, SIBLINGS, WINDOW, count_rollouts, judge, list_criteria

from grmpipe.judge.evidence import find_fault, read_quotes
from grmpipe.tiny.calculator import Carelessness, careless_episode, other_answer, right_episode
from grmpipe.tiny.problems import Problem
from grmpipe.tiny.tasks import CALLS


def ask(problem: Problem, view: str) -> tuple[list[int], str]:
    criteria = list_criteria(problem)
    listed = "".join(f"\n{number}. {one['text']}\n   (only 10 if it is met)" for number, one in enumerate(criteria, 1))
    said = judge(
        f"# Question\n\n{problem.question}\n\n# Response\n\n{view}\n\n# Criteria\n{listed}\n# Your judgement\n"
    )
    return [int(score) for score in said.rpartition("{")[2].rstrip("}").split(",")], said


@pytest.mark.parametrize("problem", CALLS.draw("train", 8, 3), ids=lambda one: str(len(one.steps)))
def test_the_rule_meets_what_is_right_and_quotes_it(problem: Problem) -> None:
    scores, said = ask(problem, right_episode(problem).view)
    assert scores == [10] * (len(problem.steps) + 1) + [1]
    rng = random.Random(problem.question)
    wrong, _ = ask(problem, other_answer(right_episode(problem), rng).view)
    assert wrong == [10] * len(problem.steps) + [1, 1]
    view = careless_episode(problem, Carelessness(read_minus_as_plus=1, miscopy=0.3), rng).view
    scores, said = ask(problem, view)
    quotes = read_quotes(said, len(scores))
    assert all(not find_fault(quotes[number], view) for number, score in enumerate(scores, 1) if score == 10)
    if any(step.sign == "-" for step in problem.steps):
        assert scores[-1] == 10 and 1 in scores[: len(problem.steps)]


def test_rollouts_are_counted_to_the_middle_of_a_window() -> None:
    counted = count_rollouts([0.5] * WINDOW + [0.9] * WINDOW)
    assert counted == pytest.approx((WINDOW / 2 + (WINDOW + 1) / 2) * GROUPS * SIBLINGS)
    assert count_rollouts([0.6] * (WINDOW + 4)) is None
