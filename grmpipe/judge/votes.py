"""Votes: the scores of several judgements of one response into one score. Pure."""

import math
import statistics
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import cast

from grmpipe.config.judge_tables import VOTES
from grmpipe.config.keys.user_code import UserCodeError, call_guarded, describe_code, format_value, to_number

Vote = Callable[[Sequence[float]], float]  # scores that one response got -> its score
WON, TIED, LOST = 1.0, 0.5, 0.0  # of one response of a pair


def mean(scores: Sequence[float]) -> float:
    """The mean: SPCT's vote on the judge's own scale (arXiv 2504.02495 sums; the mean gives the same order)."""
    return math.fsum(scores) / len(scores)


def median(scores: Sequence[float]) -> float:
    """The median: one outlier doesn't move it."""
    return statistics.median(scores)


def majority(scores: Sequence[float]) -> float:
    """The score that most judgements gave; the mean of these if several tie."""
    return statistics.fmean(sorted(statistics.multimode(scores)))


def total(scores: Sequence[float]) -> float:
    """The sum: k judgements on 1..10 give k..10k (SPCT, arXiv 2504.02495)."""
    return math.fsum(scores)


def score_std(scores: Sequence[float]) -> float:
    """Population standard deviation, in score units; 0 for a single vote."""
    middle = mean(scores)
    return math.sqrt(math.fsum((score - middle) * (score - middle) for score in scores) / len(scores))


def vote_named(name: str) -> Vote:
    """The vote that `judge.vote` names, if it uses no meta-RM. One of the user's own raises ValueError, which names it,
    for what is no score.
    """
    found = cast(Vote, VOTES.find_object(name))
    return found if name in VOTES else _checked(found)


def _checked(vote: Vote) -> Vote:
    def checked(scores: Sequence[float]) -> float:
        owner = f"judge.vote: {describe_code(vote)}"
        try:
            with call_guarded(owner):
                given = vote(scores)
        except UserCodeError as error:
            raise ValueError(str(error)) from error.__cause__
        if (score := to_number(given)) is None:
            raise ValueError(
                f"{owner} returned {format_value(given)}; return a number, the score of {len(scores)} judgements"
            )
        return score

    return checked


def pair_result(*orders: Sequence[float]) -> float:
    """The result of one response of a pair: the mean of its votes within each order of showing, then over the orders.

    So a failed judgement in one order doesn't give the other more weight: position bias stays balanced. Needs at least
    one vote in each order.
    """
    share = sum(Fraction(math.fsum(votes)) / len(votes) for votes in orders) / len(orders)
    return WON if share > TIED else LOST if share < TIED else TIED


# -- weighted by a meta-RM -------------------------------------------------------------------------------------------


def average_weighted(scores: Sequence[float], weights: Sequence[float]) -> float:
    """The mean weighted by values of 0 or more; the plain mean if all are 0."""
    total_weight = math.fsum(weights)
    if total_weight == 0:
        return mean(scores)
    return math.fsum(weight * score for weight, score in zip(weights, scores, strict=True)) / total_weight


def best_indices(weights: Sequence[float], count: int) -> list[int]:
    """The indices of the `count` highest weights, in ascending order; of equal weights the first."""
    ranked = sorted(range(len(weights)), key=lambda index: -weights[index])
    return sorted(ranked[:count])
