"""A cluster that starts the processes on a GPU one at a time.

vLLM measures free memory at its start and counts all memory that disappears meanwhile as its own: another process that
loads a model at that moment makes it miscount, or fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from models.types import Engine
from scheduler.placement import Placement
from scheduler.processes.actors import ActorGroup, Cluster, EngineFactory, MemberFactory


class SerialStarts:
    """A Cluster with one start at a time per GPU, in the order of calls. Roles on other slots, or on cores, start in
    parallel.
    """

    def __init__(self, cluster: Cluster, placement: Placement) -> None:
        self._cluster = cluster
        self._seats = placement.seats
        gpus = [name for name, pool in placement.pools.items() if pool.resource == "gpu"]
        self._locks = {(name, slot): asyncio.Lock() for name in gpus for slot in range(placement.pools[name].slots)}

    async def start_group(self, role: str, make_member: MemberFactory, *, meet: bool = True) -> ActorGroup:
        async with self._one_at_a_time(role):
            return await self._cluster.start_group(role, make_member, meet=meet)

    async def restart_member(self, role: str, rank: int) -> None:
        async with self._one_at_a_time(role, rank):
            await self._cluster.restart_member(role, rank)

    async def start_engines(self, role: str, make_engine: EngineFactory) -> dict[str, Engine]:
        async with self._one_at_a_time(role):
            return await self._cluster.start_engines(role, make_engine)

    async def restart_engine(self, role: str, name: str) -> Engine:
        (rank,) = (seat.rank for seat in self._seats[role] if seat.name == name)
        async with self._one_at_a_time(role, rank):
            return await self._cluster.restart_engine(role, name)

    def machines(self, role: str) -> frozenset[str]:
        return self._cluster.machines(role)

    def process_ids(self, role: str) -> list[int]:
        return self._cluster.process_ids(role)

    async def strangers_to(self, folder: Path) -> list[str]:
        return await self._cluster.strangers_to(folder)

    async def free_address(self, role: str) -> tuple[str, int]:
        return await self._cluster.free_address(role)

    async def shutdown(self) -> None:
        await self._cluster.shutdown()

    @asynccontextmanager
    async def _one_at_a_time(self, role: str, rank: int | None = None) -> AsyncIterator[None]:
        """Context: hold the locks of all GPUs of the role's seats, or of one rank's seat."""
        seats = [seat for seat in self._seats[role] if rank is None or seat.rank == rank]
        slots = {(seat.pool, slot) for seat in seats for slot in seat.slots}
        async with AsyncExitStack() as held:
            for slot in sorted(slots & self._locks.keys()):  # always in the same order, against deadlocks
                await held.enter_async_context(self._locks[slot])
            yield
