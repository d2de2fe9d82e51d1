"""Admission: how many groups may be in flight, when they open, and which must be trained now. Pure: rules over counts,
versions and the times of steps.

The pace is AReaL's (arXiv 2505.24298, section 5.1): (max_staleness + version + 1) * groups_per_batch groups may have
been submitted in all, not counting dropped ones. `may_take` enforces the bound on staleness.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

CYCLES = 3  # in which batches must have bunched before one is held; at random they seldom do so in each of them
STEADY = 1.25  # the slowest of these cycles to the fastest; above it lengths are so random that holding only delays
HEADWAY = 0.95  # share of a mean step; at 1 any noise would hold every batch


def is_stale(token_version: int, version: int, max_staleness: int) -> bool:
    """Whether tokens are too old for a batch that is trained from `version` on."""
    return version - token_version > max_staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The rule of admission. `version`: the number of completed optimizer steps; no step goes past `last_version`.

    opened_at: the version at which a group was opened. It stands for the group's age, because no token is older.
    """

    groups_per_batch: int
    max_staleness: int
    last_version: int

    def capacity(self, version: int, num_in_flight: int) -> int:
        """Groups that may be opened now: only groups that a step up to the last one can train."""
        versions = min(self.max_staleness + version + 1, self.last_version)
        return (versions - version) * self.groups_per_batch - num_in_flight

    def makes_room(self, version: int) -> bool:
        """Whether the end of the batch that is open at `version` lets groups open: not in the last steps."""
        return version + self.max_staleness + 1 < self.last_version

    def is_stale(self, token_version: int, version: int) -> bool:
        """Whether tokens are too old for the batch that is open at `version`."""
        return is_stale(token_version, version, self.max_staleness)

    def batches_ahead(self, opened_at: int, version: int) -> int:
        """The number of batches that may still leave a group out: 0 means that it is due in the open one."""
        return opened_at + self.max_staleness - version

    def may_take(self, opened_at: int, *, version: int, num_taken: int, waiting: Mapping[int, int]) -> bool:
        """Whether the open batch may take such a group without making another group stale.

        num_taken: groups of the open batch. waiting: opened_at -> number of groups not in it, including this one.

        A group is due at the last version whose batch it is not too old for. It gets a place only if all groups due
        before it still fit into the batches up to then (earliest due date first, with places reserved for groups that
        are not ready). What `capacity` admits always fits, so no group that ends in time becomes stale.
        """
        # The open batch alone doesn't tell: two old groups may be due in one later batch that has a single place, and a
        # young group taken now would leave both to it.
        places = self.groups_per_batch - num_taken - 1
        before = sum(count for other, count in waiting.items() if self.batches_ahead(other, version) < 0)
        for due in range(version, version + self.batches_ahead(opened_at, version)):
            before += waiting.get(due - self.max_staleness, 0)
            if before > places:
                return False
            places += self.groups_per_batch
        return True


class AdmissionPace:
    """Keeps the `max_staleness` + 1 batches in flight apart. One that follows too closely, cycle after cycle or because
    the learner was away, opens later. It only delays, so the bound on staleness is untouched. Buses are kept apart in
    the same way (Daganzo 2009, doi:10.1016/j.trb.2009.04.002).
    """

    def __init__(self, groups_per_batch: int, max_staleness: int) -> None:
        self._groups_per_batch = groups_per_batch
        self._batches = max_staleness + 1  # in a cycle, in which each of them is trained once
        self._steps_s: deque[float] = deque(maxlen=CYCLES * self._batches)
        self._ended_s = self._opens_s = -math.inf  # the last step, and when the batch opens that it made room for
        self._num_waited = 0  # batches that may be ready because the learner was away

    def step_ended(self, now_s: float, step_s: float) -> None:
        """A step of `step_s` seconds ended, and makes room for a batch."""
        away_s, self._ended_s = now_s - step_s - self._ended_s, now_s  # for an evaluation, say
        opened_s, self._opens_s = self._opens_s, now_s
        self._steps_s.append(step_s)
        if len(self._steps_s) < CYCLES * self._batches:
            return
        steps_s, n = list(self._steps_s), self._batches
        cycles_s = [statistics.fmean(steps_s[begin : begin + n]) for begin in range(0, len(steps_s), n)]
        # Nothing parts two batches that were opened together, and each slows the other down. But holding any close
        # follower cost 3 to 8 % where lengths vary, since a straggler ends the batch (benchmarks/scheduling.md).
        headway_s = HEADWAY * statistics.median(cycles_s)
        self._num_waited = n if away_s > headway_s else max(0, self._num_waited - 1)
        bunches = max(steps_s[n - 1 :: n]) < headway_s and max(cycles_s) < STEADY * min(cycles_s)
        if self._num_waited or bunches:
            self._opens_s = max(now_s, opened_s + headway_s)

    def wait_s(self, now_s: float, *, capacity: int, num_open: int) -> float:
        """Seconds until a group may open; 0: now, infinity: not before there is room. A group isn't held if it replaces
        a dropped one, or fewer than a batch are open (`num_open`), so that engines never run dry.
        """
        if capacity <= 0:
            return math.inf
        if capacity > self._groups_per_batch or num_open < self._groups_per_batch:
            return 0.0
        return max(0.0, self._opens_s - now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The number of groups submitted, and what became of them. Raises AssertionError if one was lost."""

    submitted: int
    trained: int
    dropped: Counter[str]  # by cause
    in_flight: int

    def __post_init__(self) -> None:
        assert self.submitted == self.trained + self.dropped.total() + self.in_flight, (
            f"submitted {self.submitted} != trained {self.trained} + dropped {dict(self.dropped)} "
            f"+ in flight {self.in_flight}"
        )
