"""Votes over judgements. Pure: no engine, no I/O."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from fractions import Fraction

Vote = Callable[[Sequence[float]], float]  # the scores that one response got
WON, TIED, LOST = 1.0, 0.5, 0.0  # by one of a pair


def mean(scores: Sequence[float]) -> float:
    """The vote of SPCT on the judge's own scale (arXiv 2504.02495 sums; the mean ranks alike)."""
    return math.fsum(scores) / len(scores)


def median(scores: Sequence[float]) -> float:
    """One judgement far off doesn't move it."""
    return statistics.median(scores)


def majority(scores: Sequence[float]) -> float:
    """The score that most judgements gave; the mean of those that tie."""
    return statistics.fmean(sorted(statistics.multimode(scores)))


def total(scores: Sequence[float]) -> float:
    """The sum: k judgements on 1..10 give k..10k (SPCT, arXiv 2504.02495)."""
    return math.fsum(scores)


def agreement(scores: Sequence[float]) -> float:
    """Population standard deviation, in score units; 0 for a single vote."""
    return statistics.pstdev(scores)


# `sum` ranks as its mean does, and is shown as k times it: so a judgement that failed makes no score smaller.
VOTES: dict[str, Vote] = {"mean": mean, "sum": mean, "median": median, "majority": majority}


def pair_result(*orders: Sequence[float]) -> float:
    """What one of a pair came to by the votes that it got: the mean within each order of showing, then over the orders.

    So a judgement that failed in one order doesn't leave the other more of a say: a liking for a place stays balanced.
    At least one vote in each order.
    """
    share = sum(Fraction(math.fsum(votes)) / len(votes) for votes in orders) / len(orders)
    return WON if share > TIED else LOST if share < TIED else TIED


# -- guided by a meta-RM ---------------------------------------------------------------------------------------------


def weighted(scores: Sequence[float], weights: Sequence[float]) -> float:
    """The mean by weights of 0 or more; the plain mean where all of them are 0."""
    total_weight = math.fsum(weights)
    if total_weight == 0:
        return mean(scores)
    return math.fsum(weight * score for weight, score in zip(weights, scores, strict=True)) / total_weight


def best_indices(weights: Sequence[float], count: int) -> list[int]:
    """Those of the `count` highest weights, in their own order; of equals the first."""
    ranked = sorted(range(len(weights)), key=lambda index: -weights[index])
    return sorted(ranked[:count])
