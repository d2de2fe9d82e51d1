"""The examples that tiny models of comparisons imitate. Pure: text only, trains nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from models.tiny.comparisons import (
    MISREAD,
    Comparison,
    comparison_judgement,
    corrupted_comparison,
    draw_training_comparison,
    invented_comparison,
    sloppy_comparison,
)
from models.tiny.problems import Problem, judge_prompt
from models.tiny.sft_examples import SftExample


def compare_people(problem: Problem, rng: random.Random) -> SftExample:
    """An example on a comparison of its own: a curriculum may mix both kinds of tasks, and `problem` is the other."""
    comparison = draw_training_comparison(rng)
    return SftExample(prompt=comparison.question, response=comparison.solution)


def compare_people_sloppily(problem: Problem, rng: random.Random) -> SftExample:
    comparison = draw_training_comparison(rng)
    return SftExample(prompt=comparison.question, response=sloppy_comparison(comparison, MISREAD, rng))


def judge_comparison(
    write: Callable[[Comparison, random.Random], str], problem: Problem, rng: random.Random
) -> SftExample:
    comparison = draw_training_comparison(rng)
    text = write(comparison, rng)
    return SftExample(prompt=judge_prompt(comparison.question, text), response=comparison_judgement(comparison, text))


def right_comparison(comparison: Comparison, rng: random.Random) -> str:
    return comparison.solution


def careless_comparison(comparison: Comparison, rng: random.Random) -> str:
    """A text from careful to careless, as a policy in training writes."""
    return sloppy_comparison(comparison, rng.choice((0.05, 0.2, 0.5)), rng)


COMPARISONS: dict[str, Callable[[Comparison, random.Random], str]] = {
    "right": right_comparison,
    "careless": careless_comparison,
    "corrupted": corrupted_comparison,
    "invented": invented_comparison,
}
COMPARISON_TASKS: dict[str, Callable[[Problem, random.Random], SftExample]] = {
    "compare_people": compare_people,
    "compare_people_sloppily": compare_people_sloppily,
    **{f"judge_{kind}_comparison": partial(judge_comparison, write) for kind, write in COMPARISONS.items()},
}
