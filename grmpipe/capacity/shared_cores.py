"""Processes that share cores or a GPU. Pure.

Busy processes get equal shares, and none gets more than one core or one GPU. If more processes are busy than there are
cores, they alternate, and each switch begins with cold caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.placement import Placement, Seat

# Of the work, for one further process per core: engines on two cores (benchmarks/turns.md).
CONTEXT_SWITCH_COST = 0.16


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
