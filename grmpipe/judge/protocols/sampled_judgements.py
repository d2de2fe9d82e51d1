"""Samples k judgements of one question: all at once, or in waves until they are enough.

Enough is exact, when further judgements can't change the winner of a pair, or relaxed, when the standard error of a
pointwise score is small compared with the spread of its group. Both rules read judgements in the order of their
indices: those that finish first are the short ones.
"""

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from grmpipe.judge.votes import TIED
from grmpipe.scheduler.run_together import raise_first_failure
from grmpipe.types import Failed, Judgement

WAVE = 2  # judgements asked at a time after the first ones: fewer save more and take longer, and engines batch a pair
Enough = Callable[[Sequence[Judgement], int], bool]  # (the first judgements, how many are still to come)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The rule of an early stop.

    first: judgements to ask at once, the fewest after which it may stop; then WAVE more at a time.

    auditing: whether to judge in full and record where it would have stopped.
    """

    first: int
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
    least = sum((order.bounds[0] for order in orders), Fraction()) / len(orders)
    most = sum((order.bounds[1] for order in orders), Fraction()) / len(orders)
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


Results = Sequence[Judgement | Failed]  # one index's: failures before each retry, then the last result

IN_FULL = Stop(first=1 << 30, enough=lambda judgements, num_left: False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledJudgements:
    """The results of sampling.

    stopped_after: how many of the first indices were enough; None if all were needed.
    enough:        the judgements among them.
    by_index:      the judgements of each index: several where it takes several calls.
    saved_tokens:  tokens of judgements that were never requested, at the mean length of the answers; requests cancelled
                   in flight count as spent.
    """

    judgements: tuple[Judgement, ...] = ()
    failures: tuple[Failed, ...] = ()
    enough: tuple[Judgement, ...] = ()
    by_index: tuple[tuple[Judgement, ...], ...] = ()
    stopped_after: int | None = None
    saved_tokens: int = 0


async def sample_judgements(
    ask: Callable[[int], Awaitable[Results]], num_judgements: int, stop: Stop = IN_FULL
) -> SampledJudgements:
    """Call `ask(index)` for each judgement. When they are enough, those in flight are cancelled, which frees the
    engine.
    """
    if num_judgements == 1:  # needs no task of its own
        return gather_results([await ask(0)])
    results: list[Results] = []
    tasks: list[asyncio.Task[Results]] = []
    stopped_after: int | None = None
    async with raise_first_failure() as group:
        while len(results) < num_judgements and (stopped_after is None or stop.auditing):
            if len(results) == len(tasks):
                wave = num_judgements if stop.auditing else WAVE if tasks else stop.first
                indices = range(len(tasks), min(num_judgements, len(tasks) + wave))
                tasks += [group.create_task(ask_one(ask, index)) for index in indices]
            results.append(await tasks[len(results)])
            num_left = num_judgements - len(results)
            undecided = stopped_after is None and num_left > 0 and len(results) >= stop.first
            if undecided and stop.enough(list_judgements(results), num_left):
                stopped_after = len(results)
        for task in tasks[len(results) :]:
            task.cancel()
    return gather_results(results, stopped_after=stopped_after, num_unasked=num_judgements - len(tasks))


async def ask_one(ask: Callable[[int], Awaitable[Results]], index: int) -> Results:
    return await ask(index)


def gather_results(
    results: Sequence[Results], *, stopped_after: int | None = None, num_unasked: int = 0
) -> SampledJudgements:
    judgements = list_judgements(results)
    lengths = [judgement.completion.num_tokens for judgement in judgements] if num_unasked else []
    return SampledJudgements(
        judgements=judgements,
        failures=tuple(result for some in results for result in some if isinstance(result, Failed)),
        enough=list_judgements(results[:stopped_after]),
        by_index=tuple(list_judgements([some]) for some in results),
        stopped_after=stopped_after,
        saved_tokens=round(num_unasked * statistics.fmean(lengths)) if lengths else 0,
    )


def list_judgements(results: Sequence[Results]) -> tuple[Judgement, ...]:
    return tuple(result for some in results for result in some if isinstance(result, Judgement))
