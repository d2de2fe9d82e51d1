"""Smaller votes are subsets of the sampled judgements; failed ones stay missing."""

from __future__ import annotations

import math
import random

import pytest

from grmpipe.config.judge import Scale
from grmpipe.evaluation.revote import Counting, all_drawn, best_by_meta_rm, draw_subsets, make_ballots, scores_of_draw
from grmpipe.judge.votes import Weights, mean, median
from grmpipe.models.types import Completion
from grmpipe.types import Judgement

MEAN = Counting(vote=mean)


def judgement(siblings: tuple[int, ...], scores: tuple[float, ...]) -> Judgement:
    completion = Completion(token_ids=(), logprobs=(), text="", finish_reason="stop", versions=())
    return Judgement(
        group_id="g", siblings=siblings, scores=scores, prompt_ids=(), completion=completion, grm="grm", version=0
    )


# FORMULAS: sums (17, 25); the meta-RM keeps the 1st and the 3rd: (5, 13). Shown in either order.
SPCT = [judgement((0, 1), (1, 5)), judgement((1, 0), (6, 5)), judgement((0, 1), (4, 8)), judgement((1, 0), (6, 7))]


def test_list_is_voted_on_in_the_order_of_its_siblings() -> None:
    scores = scores_of_draw(make_ballots(SPCT, 4), range(4), MEAN)
    assert {sibling: 4 * score for sibling, score in scores.items()} == {0: 17, 1: 25}


def test_the_meta_rm_keeps_the_better_half_of_a_draw() -> None:
    ballots = make_ballots(SPCT, 4, weights=[0.9, 0.1, 0.8, 0.2])
    scores = scores_of_draw(ballots, range(4), MEAN, best_by_meta_rm)
    assert {sibling: 2 * score for sibling, score in scores.items()} == {0: 5, 1: 13}


def test_a_pair_goes_by_both_its_orders_and_a_score_is_the_share_of_pairs_won() -> None:
    pairs = [judgement((0, 1), (9, 1)), judgement((1, 0), (5, 4)), judgement((1, 0), (5, 4)), judgement((2, 0), (1, 2)),
             judgement((0, 2), (3, 3))]  # fmt: skip
    ballots, counting = make_ballots(pairs, 3), Counting(vote=mean, pairwise=True)
    assert scores_of_draw(ballots, range(3), counting) == {0: 0.75, 1: 0.5, 2: 0.0}
    assert scores_of_draw(ballots, [0], counting) == {0: 1.0, 1: 0.0, 2: 0.0}


def test_a_pair_that_is_even_is_half_won_by_both() -> None:
    pair = [judgement((0, 1), (9, 1)), judgement((1, 0), (5, 4))]
    assert scores_of_draw(make_ballots(pair, 2), range(2), Counting(vote=mean, pairwise=True)) == {0: 0.5, 1: 0.5}


def test_margins_are_averaged_over_both_orders_and_not_decided() -> None:
    pair = [judgement((0, 1), (10, 1)), judgement((1, 0), (4, 7))]
    counting = Counting(vote=mean, pairwise=True, margins=Scale())
    assert scores_of_draw(make_ballots(pair, 2), range(2), counting) == {
        0: pytest.approx(5 / 6),
        1: pytest.approx(1 / 6),
    }
    assert scores_of_draw(make_ballots(pair, 2), [1], counting) == {0: pytest.approx(2 / 3), 1: pytest.approx(1 / 3)}


def test_votes_of_rollouts_follow_the_vote_of_the_judge() -> None:
    single = [judgement((0,), (score,)) for score in (1, 10, 10)]
    assert scores_of_draw(make_ballots(single, 3), range(3), Counting(vote=median)) == {0: 10}
    assert scores_of_draw(make_ballots(single, 3), [0, 1], MEAN) == {0: 5.5}


def test_the_criteria_of_a_rubric_count_by_their_weights() -> None:
    rubric, weights = [judgement((0,), (10.0, 1.0))], Weights((0.75, 0.25))
    counting = Counting(vote=mean, to_score=lambda scores: weights.to_score(scores, Scale()))
    assert scores_of_draw(make_ballots(rubric, 1), [0], counting) == {0: 7.75}


def test_a_draw_of_failed_judgements_alone_has_no_score() -> None:
    ballots = make_ballots([judgement((0,), (7,)), judgement((1,), (5,)), judgement((1,), (5,))], 2)
    assert scores_of_draw(ballots, [0], MEAN) == {0: 7, 1: 5}
    assert scores_of_draw(ballots, [1], MEAN) == {1: 5}


def test_all_subsets_are_taken_where_they_are_few_and_so_many_drawn_where_not() -> None:
    rng = random.Random(0)
    assert draw_subsets(4, 2, 6, rng) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    drawn = draw_subsets(16, 4, 32, rng)
    assert len(drawn) == 32 < math.comb(16, 4)
    assert all(len(set(draw)) == 4 and max(draw) < 16 for draw in drawn)
    assert draw_subsets(16, 4, 32, random.Random(5)) == draw_subsets(16, 4, 32, random.Random(5))


def test_the_full_draw_holds_every_judgement() -> None:
    (ballot,) = make_ballots(SPCT, 5)
    assert all_drawn(ballot, range(5)) == SPCT
