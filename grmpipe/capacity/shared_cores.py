"""Processes that share cores or a GPU: which share, and the work they get done. Pure.

Busy processes get equal shares, and none gets more than one core or one GPU. If more processes are busy than there are
cores, they alternate, and each switch begins with cold caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.placement import Placement, Seat

# Of the work, for one further process per core: engines on two cores (benchmarks/turns.md).
CONTEXT_SWITCH_COST = 0.16

Interval = tuple[float, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A shared resource. capacity: number of processes that run at full speed. context_switch_cost: share of work lost
    to switches, for each further process per shared core.
    """

    capacity: int
    seats: tuple[Seat, ...]
    is_host: bool = False  # the cores of a machine; its driver works on them too
    context_switch_cost: float = 0.0


def shared_by(placement: Placement, cores: int) -> list[Shared]:
    """The resources that several processes share. A GPU is shared by its seats. Processes with seats on CPUs run on any
    free one of `cores` cores; 0: each CPU slot is its own core.
    """
    seats = [seat for seats in placement.seats.values() for seat in seats]
    floating = tuple(seat for seat in seats if cores and placement.pools[seat.pool].resource == "cpu")
    by_slot: dict[tuple[str, int], list[Seat]] = {}
    for seat in seats:
        for slot in seat.slots if seat not in floating else ():
            by_slot.setdefault((seat.pool, slot), []).append(seat)
    shared = [Shared(capacity=1, seats=tuple(tenants)) for tenants in by_slot.values() if len(tenants) > 1]
    return (
        [*shared, Shared(capacity=cores, seats=floating, is_host=True, context_switch_cost=CONTEXT_SWITCH_COST)]
        if cores
        else shared
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkClock:
    """Maps a time to the seconds of work that a process which never stopped would have done by then."""

    times_P: Floats  # P: times at which a process began or ended
    worked_P: Floats

    def slowed(self, pace: float) -> WorkClock:
        """The clock of a process that does `pace` of the work per second that it was assumed to do."""
        if not len(self.times_P):
            return self
        began = self.times_P[0]
        return WorkClock(times_P=self.times_P, worked_P=began + pace * (self.worked_P - began))

    def at(self, time_s: float) -> float:
        """The work at a time. Outside the recorded time, a second is a second of work."""
        if not len(self.times_P) or time_s <= self.times_P[0]:
            return time_s
        beyond_s = max(0.0, time_s - float(self.times_P[-1]))
        return float(np.interp(time_s, self.times_P, self.worked_P)) + beyond_s


def work_clock(
    busy: Sequence[Sequence[Interval]], capacity: int, background: float = 0.0, context_switch_cost: float = 0.0
) -> WorkClock:
    """The work clock of a resource shared by processes that were busy in these intervals.

    background: share of the time in which one more process works, at unknown times.
    context_switch_cost: as in Shared; 0 gives the CPU time they had.
    """
    united = [interval for intervals in busy for interval in union(intervals)]
    if not united:
        return WorkClock(times_P=np.empty(0), worked_P=np.empty(0))
    times = np.array([moment for interval in united for moment in interval])
    changes = np.tile([1, -1], len(united))
    order = np.argsort(times, kind="stable")
    times, count = times[order], np.maximum(np.cumsum(changes[order])[:-1], 1)
    alone, beside = (shares(n, capacity, context_switch_cost) for n in (count, count + 1))
    share = (1 - background) * alone + background * beside
    worked = times[0] + np.concatenate([[0.0], np.cumsum(share * np.diff(times))])
    return WorkClock(times_P=times, worked_P=worked)


def shares(count: NDArray[np.int_], capacity: int, context_switch_cost: float) -> Floats:
    """The work per second of each of `count` processes."""
    turns = 1 + context_switch_cost * np.maximum(0, count - capacity) / capacity
    return np.minimum(1.0, capacity / count) / turns


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same times as intervals that don't overlap."""
    united: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if united and start_s <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end_s))
        else:
            united.append((start_s, end_s))
    return united
