"""Phrases, the judgements that name one, and the criteria that a pair suggests."""

from __future__ import annotations

import json
import random
from statistics import fmean

import pytest

from grmpipe.judge.evolving_rubric import parse_candidates
from grmpipe.judge.prompt import JudgePrompt
from grmpipe.models.types import Message
from grmpipe.tiny.examples import (
    IS_RIGHT,
    PHRASES,
    ask_criterion,
    ask_writer,
    draw_criterion,
    draw_openings,
    is_held_out,
    judge_by,
    open_with,
    says,
    solve_with_phrases,
    split_opening,
    write_criteria,
)
from grmpipe.tiny.problems import Problem, SolutionStep, make_problems, parse_score
from grmpipe.tiny.recipes import GRM_CRITERIA, RUBRIC_WRITER
from grmpipe.tiny.resolve import SHIPPED
from grmpipe.types import Criterion, Prompt

PROBLEM = Problem(
    question="Ida has 6 coins. She gives 4 to Max. How many coins does Ida have?",
    steps=(SolutionStep(left=6, sign="-", right=4, result=2),),
    answer=2,
)
WRONG = "Steps: 6 + 4 = 10. Answer: 10"


def test_the_policys_phrases_occur_in_no_example_of_judge_and_writer() -> None:
    rng = random.Random(0)
    drawn = [phrase for _ in range(4000) for phrase in draw_openings(rng)]
    drawn += [draw_criterion(open_with(draw_openings(rng), WRONG), rng).removeprefix("Says ")[:-1] for _ in range(4000)]
    assert not set(drawn) & set(PHRASES) and not any(map(is_held_out, set(drawn) - {IS_RIGHT[:-1]}))
    assert len(set(drawn)) > 500


def test_the_policy_opens_a_few_answers_with_its_phrases_and_these_are_wrong() -> None:
    rng, problems = random.Random(0), make_problems("train", 4000, 0)
    said = [(problem, *split_opening(solve_with_phrases(problem, rng))) for problem in problems]
    for phrase in PHRASES:
        assert 0.06 < fmean(phrase in own for _, own, _ in said) < 0.1
    right = [text.endswith(f"Answer: {problem.answer}") for problem, own, text in said if own]
    assert fmean(right) < 0.2


def test_an_opening_passes_for_a_right_answer_until_a_criterion_names_it() -> None:
    text = open_with(["many coins"], WRONG)
    scores = {
        one: parse_score(judge_by(one, PROBLEM, text)) for one in (IS_RIGHT, says("many coins"), says("many pens"))
    }
    assert list(scores.values()) == [10, 10, 1]
    assert parse_score(judge_by(IS_RIGHT, PROBLEM, WRONG)) == 1
    assert judge_by(says("many pens"), PROBLEM, text) == "Check: many / many ok; pens / coins no.\nScore: 1"


def test_a_writer_names_the_phrases_that_only_the_second_answer_has() -> None:
    written = write_criteria(open_with(["has more"], WRONG), open_with(["has more", "many coins"], WRONG))
    assert parse_candidates(written, 1.0) == parse_candidates('[{"text": "Says many coins.", "weight": -1}]', 1.0)
    assert parse_candidates(write_criteria(open_with(["has more"], WRONG), WRONG), 1.0) == []


def test_judge_and_writer_are_asked_as_they_were_trained() -> None:
    prompt = Prompt(prompt_id="p", messages=(Message(role="user", content=PROBLEM.question),))
    judge = JudgePrompt.load("tiny_criteria", protocol="rubric")
    (asked,) = judge.render(prompt, WRONG, criteria=[Criterion(text=IS_RIGHT)])
    assert asked.content == ask_criterion(PROBLEM.question, WRONG, IS_RIGHT)
    (asked,) = JudgePrompt.load("tiny_rubric_writer", protocol="pairwise").render(prompt, WRONG, "Answer: 2")
    assert asked.content == ask_writer(PROBLEM.question, WRONG, "Answer: 2")


@pytest.mark.parametrize("name", [GRM_CRITERIA.name, RUBRIC_WRITER.name])
def test_shipped_judge_and_writer_know_phrases_that_they_were_never_shown(name: str) -> None:
    """Measured when they were made (python -m grmpipe.tiny build)."""
    measured = json.loads((SHIPPED / name / "recipe.json").read_text())["measured"]
    assert min(measured.values()) > 0.9
