"""Turns of processes on a GPU to start, one at a time.

vLLM measures free memory at its start and counts all memory that disappears meanwhile as its own: another process that
loads a model at that moment makes it miscount, or fail.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager

from grmpipe.scheduler.placement import Placement, Seat


class StartTurns:
    """One start at a time per GPU, in the order of calls. On other slots, or on cores, processes start in parallel."""

    def __init__(self, placement: Placement) -> None:
        gpus = [name for name, pool in placement.pools.items() if pool.resource == "gpu"]
        self._locks = {(name, slot): asyncio.Lock() for name in gpus for slot in range(placement.pools[name].slots)}
        self.starting: list[Seat] = []  # whose processes start now, or wait for their turn

    @asynccontextmanager
    async def one_at_a_time(self, seats: Collection[Seat]) -> AsyncIterator[None]:
        """Context: hold the locks of all GPUs of these seats."""
        slots = {(seat.pool, slot) for seat in seats for slot in seat.slots}
        self.starting += seats
        try:
            async with AsyncExitStack() as held:
                for slot in sorted(slots & self._locks.keys()):  # always in the same order, against deadlocks
                    await held.enter_async_context(self._locks[slot])
                yield
        finally:
            for seat in seats:
                self.starting.remove(seat)
