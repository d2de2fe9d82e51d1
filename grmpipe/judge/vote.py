"""Votes over judgements. Pure: no engine, no I/O."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

Vote = Callable[[Sequence[float]], float]


def mean(scores: Sequence[float]) -> float:
    """The vote of SPCT on the judge's own scale (arXiv 2504.02495 sums; the mean ranks alike)."""
    return math.fsum(scores) / len(scores)


def median(scores: Sequence[float]) -> float:
    """One judgement far off doesn't move it."""
    return statistics.median(scores)


def total(scores: Sequence[float]) -> float:
    """The sum: k judgements on 1..10 give k..10k (SPCT, arXiv 2504.02495)."""
    return math.fsum(scores)


def agreement(scores: Sequence[float]) -> float:
    """Population standard deviation, in score units; 0 for a single vote."""
    return statistics.pstdev(scores)


VOTES: dict[str, Vote] = {"mean": mean, "median": median}
