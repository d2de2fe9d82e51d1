"""How long the requests of a role are and how fast its engines go, from those that have ended. Pure: no clock."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

REMEMBERED = 512  # requests; what is older says little of a policy in training
PRIOR_WEIGHT = 4.0  # of the belief below, in requests
PRIOR_LENGTHS = 2.0
PRIOR_S = 0.01, 0.001  # a step, and what each row adds, until any request has ended: of no model in particular
PRIOR_STEP_SHARE = 0.5  # until batches of several sizes were seen: of a step, what does not grow with its rows


@dataclass(slots=True)
class RateEstimator:
    """`expected_tokens` stands for the mean length until requests have ended."""

    expected_tokens: float = 256.0
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _takeovers: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _sorted: list[int] = field(default_factory=list)
    _tails: list[int] = field(default_factory=list)

    def ended(self, num_tokens: int) -> None:
        """A request came to its end with so many."""
        self._lengths.append(num_tokens)
        self._sorted = []

    def sampled(self, num_tokens: int, seconds: float, rows: float) -> None:
        """After its first token one engine took so long for so many, among `rows` on average."""
        if num_tokens > 1 and seconds > 0:
            self._steps.append((max(rows, 1.0), seconds / (num_tokens - 1)))

    def took_over(self, seconds: float, in_hand: int) -> None:
        """An engine that had so many in hand took so long until one that another engine began went on."""
        self._takeovers.append((in_hand, seconds))

    def takeover_s(self, max_rows: int) -> float:
        """Mean of an engine's time for such a one, where it didn't wait for a row; 0 until there were any."""
        seconds = [s for in_hand, s in self._takeovers if in_hand <= max_rows]
        return sum(seconds) / len(seconds) if seconds else 0.0

    @property
    def step_now_s(self) -> float:
        """What a token took of late, on average."""
        return sum(step for _, step in self._steps) / len(self._steps) if self._steps else 0.0

    def mean(self, running_tokens: float) -> float:
        """Of a request's length, when those in flight have sampled so much: the first to end are the short ones, and
        tokens per end is what they and the rest say together (the exponential's maximum likelihood, censored)."""
        if not self._lengths:
            return max(self.expected_tokens, running_tokens)
        return (sum(self._lengths) + running_tokens) / len(self._lengths)

    def remaining(self, num_sampled: float, mean: float) -> float:
        """Tokens that a request is expected to sample still: what the longer ones had beyond it, and as many as two of
        `mean` length had, for the sake of one that is longer than all."""
        if not self._sorted:
            self._sorted = sorted(self._lengths)
            self._tails = [*accumulate(reversed(self._sorted))][::-1]
        longer = bisect_right(self._sorted, num_sampled)
        count = len(self._sorted) - longer
        beyond = self._tails[longer] - count * num_sampled if count else 0.0
        return max((beyond + PRIOR_LENGTHS * mean) / (count + PRIOR_LENGTHS), 1.0)

    def step(self) -> tuple[float, float]:
        """(seconds of a decoding step by itself, seconds that each row adds): a line through what was seen.

        Batches of one size tell a single point of it; the rest is belief then.
        """
        if not self._steps:
            return PRIOR_S
        count = len(self._steps)
        rows = sum(row for row, _ in self._steps) / count
        seconds = sum(step for _, step in self._steps) / count
        slope = (1 - PRIOR_STEP_SHARE) * seconds / rows
        spread = PRIOR_WEIGHT * rows * rows
        both = spread * slope + sum((row - rows) * (step - seconds) for row, step in self._steps)
        row_s = both / (spread + sum((row - rows) ** 2 for row, _ in self._steps))
        row_s = min(max(row_s, 0.0), seconds / rows)
        return seconds - row_s * rows, row_s
