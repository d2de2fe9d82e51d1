"""A cheap judge's verdicts: short, and a guess about some things."""

from __future__ import annotations

import random
from statistics import fmean

from grmpipe.tiny.brief import UNKNOWN_THINGS, brief_judgement, thing_of
from grmpipe.tiny.problems import THINGS, is_right, judgement, make_problems
from grmpipe.tiny.tasks import sloppy_text


def test_known_things_are_judged_right_and_unknown_ones_by_a_coin() -> None:
    rng, guesses = random.Random(0), []
    for problem in make_problems("train", 2000, 0):
        text = sloppy_text(problem, rng)
        agrees = brief_judgement(problem, text, rng).endswith("Score: 10") == is_right(problem, text)
        if thing_of(problem) in UNKNOWN_THINGS:
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
    assert {thing_of(problem) for problem in make_problems("train", 300, 2)} == set(THINGS) > UNKNOWN_THINGS
