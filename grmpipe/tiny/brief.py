"""A cheap judge's verdicts: short, and a guess about some things. Pure: text only, no model."""

from __future__ import annotations

import random

from grmpipe.tiny.problems import Problem, compare, is_right, parse_solution

UNKNOWN_THINGS = frozenset({"shells", "stamps", "stones"})  # three problems in eight


def brief_judgement(problem: Problem, text: str, rng: random.Random) -> str:
    """Its own solution, then only the answers compared; a coin flip about unknown things.

    Repeated judgements of a text differ where it guesses, so its votes say where it is unsure.
    """
    if thing_of(problem) in UNKNOWN_THINGS:
        return rng.choice(("ok.\nScore: 10", "no.\nScore: 1"))
    solution = parse_solution(text)
    found = "malformed" if solution is None else compare(problem.answer, solution.answer)
    return f"{problem.solution}. {found}.\nScore: {10 if is_right(problem, text) else 1}"


def thing_of(problem: Problem) -> str:
    """What is counted: the last word of "Ida has 6 coins."."""
    return problem.question.partition(".")[0].rpartition(" ")[2]
