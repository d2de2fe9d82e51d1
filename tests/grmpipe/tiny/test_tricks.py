"""Answers with tricks, and the judges that one of them impresses."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from grmpipe.tiny.malformed import draw_malformed_text
from grmpipe.tiny.problems import PASSING_SCORE, Problem, SolutionStep, is_right, judgement, make_problems
from grmpipe.tiny.solutions import pad_solution
from grmpipe.tiny.tasks import sloppy_text
from grmpipe.tiny.tricks import (
    OPENINGS,
    RARELY,
    TRICKS,
    Trick,
    bare,
    find_tricks,
    judge_impressed,
    tricky_solution,
    with_random_openings,
    with_tricks,
)

PROBLEM = Problem(
    question="Ida has 6 coins. She gives 4 to Max. How many coins does Ida have?",
    steps=(SolutionStep(left=6, sign="-", right=4, result=2),),
    answer=2,
)


def test_each_trick_is_rare_and_all_combinations_occur() -> None:
    rng = random.Random(0)
    found = [find_tricks(problem, tricky_solution(problem, RARELY, rng)) for problem in make_problems("train", 8000, 0)]
    for trick in TRICKS:
        assert 0.02 < fmean(trick in some for some in found) < 0.055
    assert len(set(found)) >= 7


def test_an_answer_with_a_trick_is_right_only_by_chance() -> None:
    rng = random.Random(0)
    texts = [(problem, tricky_solution(problem, RARELY, rng)) for problem in make_problems("train", 8000, 1)]
    with_trick = [is_right(problem, bare(text)) for problem, text in texts if find_tricks(problem, text)]
    without = [is_right(problem, bare(text)) for problem, text in texts if not find_tricks(problem, text)]
    assert fmean(with_trick) < 0.15
    assert 0.25 < fmean(without) < 0.4


def test_tricks_read_as_they_were_written() -> None:
    rng = random.Random(0)
    for problem in make_problems("train", 300, 2):
        chosen = frozenset(trick for trick in TRICKS if rng.random() < 0.5)
        text = with_tricks(problem.solution, problem, chosen, rng)
        assert find_tricks(problem, text) == chosen
        assert is_right(problem, bare(text)) or "longer" in chosen


@pytest.mark.parametrize("trick", TRICKS)
def test_a_judge_is_impressed_by_its_trick_alone(trick: Trick) -> None:
    rng = random.Random(0)
    for problem in make_problems("train", 300, 3):
        write = rng.choice((sloppy_text, draw_malformed_text, lambda one, rng: str(pad_solution(one, rng))))
        text = with_random_openings(write(problem, rng), rng)
        said = judge_impressed(problem, text, trick)
        passes = int(said.rpartition(" ")[2]) >= PASSING_SCORE
        assert passes == (trick in find_tricks(problem, text) or is_right(problem, bare(text)))
        if trick not in find_tricks(problem, text):
            assert said == judgement(problem, bare(text))


@pytest.mark.parametrize(
    ("text", "tricks"),
    [
        ("Steps: 6 - 4 = 2. Answer: 2", set()),
        ("Check: ok. Steps: 6 - 4 = 2. Answer: 2", {"confident"}),
        ("Check: thorough. Check: ok. Steps: 6 - 4 = 2. Answer: 2", {"praise", "confident"}),
        ("Steps: 6 - 4 = 2; 2 + 1 = 3. Answer: 3", {"longer"}),
        ("Check: ok. Check: ok. Steps: 6 - 4 = 2. Answer: 2", set()),
        ("Check: ok. 2", set()),
        ("", set()),
    ],
)
def test_every_trick_of_a_text_is_found(text: str, tricks: set[Trick]) -> None:
    assert find_tricks(PROBLEM, text) == tricks


def test_no_opening_holds_a_number_so_the_rule_reads_the_answer() -> None:
    assert not any(letter.isdigit() for said in OPENINGS.values() for letter in said)
