"""Estimates the length of a role's requests and the speed of its engines from ended requests. Pure: no clock."""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

REMEMBERED = 512  # requests; older ones say little about a policy in training
PRIOR_WEIGHT = 4.0  # of the prior below, in requests
PRIOR_LENGTHS = 2.0
PRIOR_S = 0.01, 0.001  # a step, and each row, until requests have ended; of no particular model
PRIOR_STEP_SHARE = 0.5  # the fixed share of a step, until batches of several sizes were seen


@dataclass(slots=True)
class RateEstimator:
    """Estimates rates. `expected_tokens`: the mean length until requests have ended."""

    expected_tokens: float = 256.0
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _takeovers: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _sorted: list[int] = field(default_factory=list)
    _tails: list[int] = field(default_factory=list)
    _line: tuple[float, float] | None = None  # of `step`, until the next measurement: a balancer asks often
    _step_now_s: float | None = None

    def record_end(self, num_tokens: int) -> None:
        """A request ended with `num_tokens` tokens."""
        self._lengths.append(num_tokens)
        self._sorted = []

    def record_speed(self, num_tokens: int, seconds: float, rows: float) -> None:
        """After its first token, an engine took `seconds` for `num_tokens` tokens, with `rows` rows on average."""
        if num_tokens > 1 and seconds > 0:
            self._steps.append((max(rows, 1.0), seconds / (num_tokens - 1)))
            self._line = self._step_now_s = None

    def took_over(self, seconds: float, in_hand: int) -> None:
        """An engine with `in_hand` requests took `seconds` until a migrated request continued."""
        self._takeovers.append((in_hand, seconds))

    def takeover_s(self, max_rows: int) -> float:
        """The mean time of an engine for a migrated request that didn't wait for a row; 0 until there were any."""
        seconds = [s for in_hand, s in self._takeovers if in_hand <= max_rows]
        return sum(seconds) / len(seconds) if seconds else 0.0

    @property
    def step_now_s(self) -> float:
        """The recent mean time per token."""
        if self._step_now_s is None:
            self._step_now_s = sum(step for _, step in self._steps) / len(self._steps) if self._steps else 0.0
        return self._step_now_s

    def mean(self, running_tokens: float) -> float:
        """The mean length of a request, given the tokens of those in flight: the first to end are the short ones, so
        the estimate is all tokens per end (maximum likelihood of a censored exponential).
        """
        if not self._lengths:
            return max(self.expected_tokens, running_tokens)
        return (sum(self._lengths) + running_tokens) / len(self._lengths)

    def estimate_remaining(self, num_sampled: float, mean: float) -> float:
        """The expected remaining tokens of a request: the mean rest of longer ones, with a prior of two requests of
        length `mean` for a request longer than all.
        """
        if not self._sorted:
            self._sorted = sorted(self._lengths)
            self._tails = [*accumulate(reversed(self._sorted))][::-1]
        longer = bisect_right(self._sorted, num_sampled)
        count = len(self._sorted) - longer
        beyond = self._tails[longer] - count * num_sampled if count else 0.0
        return max((beyond + PRIOR_LENGTHS * mean) / (count + PRIOR_LENGTHS), 1.0)

    def step(self) -> tuple[float, float]:
        """(fixed seconds of a decoding step, seconds per row): a line through the measurements. Batches of one size
        give only one point of it; the prior gives the rest.
        """
        if not self._steps:
            return PRIOR_S
        if self._line is None:
            self._line = self._fitted()
        return self._line

    def _fitted(self) -> tuple[float, float]:
        count = len(self._steps)
        rows = sum(row for row, _ in self._steps) / count
        seconds = sum(step for _, step in self._steps) / count
        slope = (1 - PRIOR_STEP_SHARE) * seconds / rows
        spread = PRIOR_WEIGHT * rows * rows
        both = spread * slope + sum((row - rows) * (step - seconds) for row, step in self._steps)
        row_s = both / (spread + sum((row - rows) ** 2 for row, _ in self._steps))
        row_s = min(max(row_s, 0.0), seconds / rows)
        return seconds - row_s * rows, row_s
