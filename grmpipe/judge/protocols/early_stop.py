"""Early stop: when further judgements can't change the result. Pure: scores in, a decision out.

Exact: the winner of a pair is fixed. Relaxed: the standard error of a pointwise score is small compared with the spread
of its group. Both read judgements in the order of their indices: those that finish first are the short ones.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from grmpipe.judge.votes import TIED
from grmpipe.types import Judgement

Enough = Callable[[Sequence[Judgement], int], bool]  # (the first judgements, how many are still to come)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The rule of an early stop.

    first: judgements to ask at once, the fewest after which it may stop; then `wave` more at a time.

    auditing: whether to judge in full and record where it would have stopped.
    """

    first: int
    wave: int
    enough: Enough
    auditing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderCounts:
    """Counts of a pair's judgements in one order of showing: points of one response, votes so far, judgements left."""

    points: float
    num_votes: int
    num_left: int

    @property
    def bounds(self) -> tuple[Fraction, Fraction]:
        """The bounds of the final mean of the votes, however many of the remaining judgements fail."""
        points, most_votes = Fraction(self.points), self.num_votes + self.num_left
        return points / most_votes, (points + self.num_left) / most_votes


def winner_is_fixed(*orders: OrderCounts) -> bool:
    """Whether the judgements left can't change who wins a pair, as `pair_result` counts. A tie isn't a winner, and
    there is no winner before each order has a vote.
    """
    if not all(order.num_votes for order in orders):
        return False
    least, most = (sum(bound) / len(orders) for bound in zip(*(order.bounds for order in orders), strict=True))
    return least > TIED or most < TIED


def fewest_for_a_winner(num_judgements: int) -> int:
    """The fewest of k judgements after which a winner can be fixed: 5 of 8."""
    return num_judgements // 2 + 1


class Noise:
    """The pooled variance of judgements of the same text, over all texts so far.

    A few judgements that happen to agree say little about their error. So a text's variance is averaged with the pooled
    one at PRIOR_DEGREES of freedom, as is usual for many small samples (moderated variance, Smyth 2004).
    """

    PRIOR_DEGREES = 4.0

    def __init__(self) -> None:
        self._squares = 0.0
        self._degrees = 0

    @property
    def is_known(self) -> bool:
        return self._degrees >= self.PRIOR_DEGREES

    def add(self, scores: Sequence[float]) -> None:
        """Add the scores of one text."""
        if len(scores) > 1:
            self._squares += sum_squares(scores)
            self._degrees += len(scores) - 1

    def standard_error(self, scores: Sequence[float]) -> float:
        """The standard error of the mean of these scores, in score units. Infinite while the variance is unknown."""
        if not self.is_known or not scores:
            return math.inf
        pooled = self._squares / self._degrees
        own_degrees = len(scores) - 1
        variance = (self.PRIOR_DEGREES * pooled + sum_squares(scores)) / (self.PRIOR_DEGREES + own_degrees)
        return math.sqrt(variance / len(scores))


def sum_squares(scores: Sequence[float]) -> float:
    mean = statistics.fmean(scores)
    return math.fsum((score - mean) ** 2 for score in scores)


def is_sure(scores: Sequence[float], means_of_group: Sequence[float], noise: Noise, max_error: float) -> bool:
    """Whether the mean's standard error is at most `max_error` times the spread of the group's means.

    Never sure for a group with fewer than two known means, or with equal means: it has no spread.
    """
    if len(means_of_group) < 2:
        return False
    spread = statistics.pstdev(means_of_group)
    return spread > 0 and noise.standard_error(scores) <= max_error * spread
