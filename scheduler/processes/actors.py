"""A plain class as a group of actors, and where engines come from: the protocols, and both in this process. No Ray."""

from __future__ import annotations

import asyncio
import operator
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, runtime_checkable

from models.types import Engine
from scheduler.placement import Placement

# (rank, world_size, init_method) -> the member; init_method is what torch.distributed takes, None for a lone rank.
MemberFactory = Callable[[int, int, str | None], object]
EngineFactory = Callable[[int], Engine]  # by the rank of its seat, on the event loop that will drive the engine
LOOPBACK = "127.0.0.1"


class ActorDied(Exception):
    """The process of an actor is gone, with what was asked of it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name} died: {self.reason}"


class ActorGroup(Protocol):
    """Members of one class, one per rank. What a method raises is raised here as itself; a death as ActorDied."""

    @property
    def size(self) -> int: ...

    async def call(self, rank: int, method: str, *args: object) -> object:
        """Calls of one rank are served one after another, in the order they came."""
        ...

    async def call_all(self, method: str, *args: object) -> list[object]:
        """The same arguments to every rank; answers by rank."""
        ...

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        """Its own arguments to each rank; answers by rank."""
        ...

    async def close(self) -> None: ...


class Cluster(Protocol):
    """Starts the processes of a placement, and ends them."""

    async def start_group(self, role: str, make_member: MemberFactory) -> ActorGroup:
        """One member per replica of the role, all made at the same time."""
        ...

    async def restart_member(self, role: str, rank: int) -> None:
        """End what is left of a member that needs no others, and make it anew on the same seat, in the same group."""
        ...

    async def start_engines(self, role: str, make_engine: EngineFactory) -> dict[str, Engine]:
        """One engine per replica of the role, under names such as `policy-0`."""
        ...

    async def restart_engine(self, role: str, name: str) -> Engine:
        """End what is left of an engine, with all that it started, and make it anew on the same seat."""
        ...

    def machines(self, role: str) -> frozenset[str]:
        """Where the seats of a role are."""
        ...

    def process_ids(self, role: str) -> list[int]:
        """None where some are on other machines, or where they are this very process."""
        ...

    async def strangers_to(self, folder: Path) -> list[str]:
        """Machines with seats that see another folder under this path than the driver does, and how they tell."""
        ...

    async def free_address(self, role: str) -> tuple[str, int]:
        """An address of the machine of the role's first process, as all others reach it, and a port free there.

        The next to bind gets it: ask right before use. The role must have been started as a group."""
        ...

    async def shutdown(self) -> None: ...


@runtime_checkable
class Closable(Protocol):
    """An engine or a member that holds a thread, a process or a file and wants to hear when the run ends."""

    def close(self) -> None: ...


def free_port(host: str) -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class InProcessGroup:
    """One member on a thread of its own: made there, called there."""

    size = 1

    def __init__(self, name: str, thread: ThreadPoolExecutor, member: object) -> None:
        self._name = name
        self._thread = thread
        self._member = member
        self._closed = False

    @classmethod
    async def start(cls, name: str, make_member: MemberFactory) -> InProcessGroup:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        try:
            member = await asyncio.get_running_loop().run_in_executor(thread, make_member, 0, 1, None)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(name, thread, member)

    async def call(self, rank: int, method: str, *args: object) -> object:
        if rank != 0:
            raise IndexError(f"{self._name} is the only rank of its group; there is no rank {rank}")
        if self._closed:
            raise ActorDied(self._name, "it was closed")
        ask = operator.methodcaller(method, *args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, ask, self._member)

    async def call_all(self, method: str, *args: object) -> list[object]:
        return [await self.call(0, method, *args)]

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        (args,) = args_by_rank
        return [await self.call(0, method, *args)]

    async def close(self) -> None:
        if not self._closed and isinstance(self._member, Closable):
            await self.call(0, "close")
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


class InProcessCluster:
    """Everything in this process, for tests and debuggers. Slots are not held against the machine's cores."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._groups: list[InProcessGroup] = []
        self._factories: dict[str, EngineFactory] = {}
        self._engines: dict[str, Engine] = {}

    async def start_group(self, role: str, make_member: MemberFactory) -> ActorGroup:
        seats = self._placement.seats[role]
        if len(seats) > 1:
            raise ValueError(
                f"placement.roles.{role}.replicas: {len(seats)} ranks need one process each; "
                f"set cluster=ray, or placement.roles.{role}.replicas=1"
            )
        group = await InProcessGroup.start(seats[0].name, make_member)
        self._groups.append(group)
        return group

    async def restart_member(self, role: str, rank: int) -> None:
        raise AssertionError(f"{role}-{rank} lives in this process: it can't have died alone")

    async def start_engines(self, role: str, make_engine: EngineFactory) -> dict[str, Engine]:
        engines = {seat.name: make_engine(seat.rank) for seat in self._placement.seats[role]}
        self._factories[role] = make_engine
        self._engines |= engines
        return engines

    async def restart_engine(self, role: str, name: str) -> Engine:
        (seat,) = (seat for seat in self._placement.seats[role] if seat.name == name)
        if isinstance(old := self._engines.pop(name, None), Closable):
            old.close()
        self._engines[name] = engine = self._factories[role](seat.rank)
        return engine

    def machines(self, role: str) -> frozenset[str]:
        return frozenset({"this machine"})

    def process_ids(self, role: str) -> list[int]:
        return []

    async def strangers_to(self, folder: Path) -> list[str]:
        return []

    async def free_address(self, role: str) -> tuple[str, int]:
        return LOOPBACK, free_port(LOOPBACK)

    async def shutdown(self) -> None:
        for engine in self._engines.values():
            if isinstance(engine, Closable):
                engine.close()
        for group in self._groups:
            await group.close()
