"""Votes, by the numbers of the SPCT paper's example."""

from __future__ import annotations

import pytest

from grmpipe.judge.vote import agreement, mean, median, total

JUDGEMENTS = ((1, 5), (5, 6), (4, 8), (7, 6))  # of two responses
FIRST, SECOND = zip(*JUDGEMENTS, strict=True)


def test_sums_are_those_of_the_paper() -> None:
    assert (total(FIRST), total(SECOND)) == (17, 25)
    assert (total((FIRST[0], FIRST[2])), total((SECOND[0], SECOND[2]))) == (5, 13)


def test_the_mean_keeps_the_scale() -> None:
    assert (mean(FIRST), mean(SECOND)) == (4.25, 6.25)


def test_one_judgement_far_off_moves_the_mean_but_not_the_median() -> None:
    assert median((8, 8, 9, 1)) == 8
    assert mean((8, 8, 9, 1)) == 6.5


def test_agreement_is_the_population_std_and_zero_for_one_vote() -> None:
    assert agreement((7,)) == 0
    assert agreement((2, 4)) == 1
    assert agreement(FIRST) == pytest.approx(4.6875**0.5)
