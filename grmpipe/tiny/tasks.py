"""The tasks of tiny models: how problems are drawn, which answers are right, texts to judge. Pure: text only."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grmpipe.tiny.calculator import (
    Carelessness,
    answers_right,
    careless_episode,
    corrupt_episode,
    judge_prompt_of_view,
    judgement_of_calls,
    right_episode,
)
from grmpipe.tiny.comparisons import (
    Comparison,
    compares_right,
    comparison_judgement,
    corrupt_comparison,
    invent_comparison,
    make_comparisons,
    sloppy_comparison,
)
from grmpipe.tiny.malformed import draw_malformed_text, draw_malformed_view
from grmpipe.tiny.problems import LARGE, Problem, Split, is_right, judge_prompt, judgement, make_problems
from grmpipe.tiny.solutions import Sloppiness, corrupt_solution, pad_solution, sloppy_solution
from grmpipe.tiny.tricks import bare
from grmpipe.tiny.walks import final, make_walks

Write = Callable[[Any, random.Random], str]  # a text that answers a problem of the task


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyTask:
    """One kind of problem.

    draw:  (split, count, seed) -> problems.
    right: whether a text answers a problem right: the rule that training never sees.
    """

    draw: Callable[[Split, int, int], Sequence[Any]]
    right: Callable[[Any, str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTask(TinyTask):
    """A task whose answers a GRM judges.

    prompt:  (question, text) -> the user message of the judge.
    verdict: (problem, text) -> what a perfect judge writes.
    texts:   texts by how they were made.
    """

    prompt: Callable[[str, str], str]
    verdict: Callable[[Any, str], str]
    texts: Mapping[str, Write]


def right_text(problem: Problem, rng: random.Random) -> str:
    return str(problem.solution)


def sloppy_text(problem: Problem, rng: random.Random) -> str:
    """A text from careful to careless, as a policy in training writes."""
    sloppiness = Sloppiness(
        read_minus_as_plus=rng.choice((0.1, 0.3, 0.6)),
        slip=rng.choice((0.03, 0.1)),
        skip=rng.choice((0.03, 0.1)),
        miscopy=rng.choice((0.03, 0.1)),
        twice=rng.choice((0.03, 0.1)),
    )
    return str(sloppy_solution(problem, sloppiness, rng))


def right_view(problem: Problem, rng: random.Random) -> str:
    return right_episode(problem).view


def careless_view(problem: Problem, rng: random.Random) -> str:
    """A view from careful to careless, as of a policy in training."""
    carelessness = Carelessness(
        read_minus_as_plus=rng.choice((0.1, 0.3, 0.6)),
        miscopy=rng.choice((0.02, 0.1)),
        skip=rng.choice((0.02, 0.1)),
        twice=rng.choice((0.02, 0.1)),
        old_result=rng.choice((0.02, 0.1)),
    )
    return careless_episode(problem, carelessness, rng).view


def careless_comparison(comparison: Comparison, rng: random.Random) -> str:
    """A text from careful to careless, as a policy in training writes."""
    return sloppy_comparison(comparison, rng.choice((0.05, 0.2, 0.5)), rng)


SUMS = JudgedTask(
    draw=make_problems,
    right=lambda problem, text: is_right(problem, bare(text)),
    prompt=judge_prompt,
    verdict=judgement,
    texts={
        "right": right_text,
        "sloppy": sloppy_text,
        "corrupted": lambda problem, rng: str(corrupt_solution(problem, rng)),
        "padded": lambda problem, rng: str(pad_solution(problem, rng)),
        "malformed": draw_malformed_text,
    },
)
CALLS = JudgedTask(
    draw=partial(make_problems, sizes=LARGE),
    right=answers_right,
    prompt=judge_prompt_of_view,
    verdict=judgement_of_calls,
    texts={
        "right": right_view,
        "careless": careless_view,
        "corrupted": lambda problem, rng: corrupt_episode(problem, rng).view,
        "malformed": draw_malformed_view,
    },
)
COMPARISONS = JudgedTask(
    draw=make_comparisons,
    right=compares_right,
    prompt=judge_prompt,
    verdict=comparison_judgement,
    texts={
        "right": lambda comparison, rng: comparison.solution,
        "careless": careless_comparison,
        "corrupted": corrupt_comparison,
        "invented": invent_comparison,
    },
)
WALKS = TinyTask(draw=make_walks, right=lambda walk, text: text == final(walk))
