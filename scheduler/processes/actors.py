"""Ranks of actors and clusters: the protocols, and implementations in this process."""

from __future__ import annotations

import asyncio
import inspect
import operator
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, runtime_checkable

from grmpipe.models.types import Engine
from grmpipe.scheduler.placement import Placement, Seat
from grmpipe.scheduler.processes.start_turns import StartTurns

# (rank, world_size, init_method) -> the member. init_method: for torch.distributed; None for a single rank.
MemberFactory = Callable[[int, int, str | None], object]
EngineFactory = Callable[[int], Engine]  # rank of its seat -> engine; called on the event loop that will drive it
LOOPBACK = "127.0.0.1"


class ActorDied(Exception):
    """The process of an actor died, and its calls with it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name} died: {self.reason}"


class ActorRanks(Protocol):
    """Members of one class, one per rank. An error of a method is raised here as itself, a death as ActorDied."""

    @property
    def size(self) -> int: ...

    async def call(self, rank: int, method: str, *args: object) -> object:
        """Call one rank. Its calls are served one after another, in their order; those of `async` methods begin in
        their order, and overlap.
        """
        ...

    async def call_all(self, method: str, *args: object) -> list[object]:
        """Call every rank with the same arguments. Returns answers by rank."""
        ...

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        """Call each rank with its own arguments. Returns answers by rank."""
        ...

    async def close(self) -> None: ...


class Cluster(Protocol):
    """Starts and ends the processes of a placement."""

    async def start_members(self, role: str, make_member: MemberFactory, *, meet: bool = True) -> ActorRanks:
        """One member per replica of the role, all made at the same time.

        meet: whether the members meet in collectives, as ranks of a learner do; else each works by itself, and gets no
        `init_method`.
        """
        ...

    async def restart_member(self, role: str, rank: int) -> None:
        """End the rest of a member that needs no others, and make it again on the same seat, with the same rank."""
        ...

    async def start_engines(self, role: str, make_engine: EngineFactory) -> dict[str, Engine]:
        """One engine per replica of the role, under names such as `policy-0`."""
        ...

    async def restart_engine(self, role: str, name: str) -> Engine:
        """End the rest of an engine, with all processes it started, and make it again on the same seat."""
        ...

    @property
    def starting(self) -> Sequence[Seat]:
        """The seats whose processes start now, or wait for their turn to."""
        ...

    def machines(self, role: str) -> frozenset[str]:
        """The machines of the role's seats."""
        ...

    def process_ids(self, role: str) -> list[int]:
        """The process ids of a role. None if some are on other machines, or in this process."""
        ...

    async def strangers_to(self, folder: Path) -> list[str]:
        """Machines with seats that see another folder under this path than the driver does, and how that shows."""
        ...

    async def free_address(self, role: str) -> tuple[str, int]:
        """The address of the machine of the role's first process, reachable by all others, and a free port there.

        Any process may take the port: call this right before use. The role must have been started by `start_members`.
        """
        ...

    async def shutdown(self) -> None: ...


@runtime_checkable
class Closable(Protocol):
    """An engine or a member that holds a thread, a process or a file, to be closed at the end of the run."""

    def close(self) -> None: ...


def free_port(host: str) -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


async def ask_member(thread: Executor, member: object, method: str, *args: object) -> object:
    """Call a method of a member: an `async` one on this event loop, where calls overlap; any other on the member's
    thread, one at a time.
    """
    if inspect.iscoroutinefunction(called := operator.attrgetter(method)(member)):
        return await called(*args)
    return await asyncio.get_running_loop().run_in_executor(thread, called, *args)


class InProcessMember:
    """A member on its own thread: made there, called there."""

    def __init__(self, name: str, thread: ThreadPoolExecutor, member: object) -> None:
        self._name = name
        self._thread = thread
        self._member = member
        self._closed = False

    @classmethod
    async def start(cls, name: str, make_member: MemberFactory, rank: int, world_size: int) -> InProcessMember:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        try:
            member = await asyncio.get_running_loop().run_in_executor(thread, make_member, rank, world_size, None)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(name, thread, member)

    async def call(self, method: str, *args: object) -> object:
        if self._closed:
            raise ActorDied(self._name, "it was closed")
        return await ask_member(self._thread, self._member, method, *args)

    async def close(self) -> None:
        if not self._closed and isinstance(self._member, Closable):
            await self.call("close")
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


class InProcessRanks:
    """The members of one class, all in this process."""

    def __init__(self, seats: Sequence[Seat], make_member: MemberFactory, members: list[InProcessMember]) -> None:
        self._seats = seats
        self._make_member = make_member
        self._members = members  # by rank

    @classmethod
    async def start(cls, seats: Sequence[Seat], make_member: MemberFactory) -> InProcessRanks:
        ranks = cls(seats, make_member, [])
        try:
            for seat in seats:
                ranks._members.append(await ranks._made(seat))
        except BaseException:
            await ranks.close()
            raise
        return ranks

    @property
    def size(self) -> int:
        return len(self._members)

    async def call(self, rank: int, method: str, *args: object) -> object:
        return await self._members[rank].call(method, *args)

    async def call_all(self, method: str, *args: object) -> list[object]:
        return await self.call_each(method, [args] * self.size)

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        calls = (one.call(method, *args) for one, args in zip(self._members, args_by_rank, strict=True))
        return list(await asyncio.gather(*calls))

    async def restart(self, rank: int) -> None:
        """Close a member that meets no others, and make it again."""
        await self._members[rank].close()
        self._members[rank] = await self._made(self._seats[rank])

    async def close(self) -> None:
        for member in self._members:
            await member.close()

    async def _made(self, seat: Seat) -> InProcessMember:
        return await InProcessMember.start(seat.name, self._make_member, seat.rank, len(self._seats))


class InProcessCluster:
    """A cluster within this process, for tests and debuggers. It doesn't check the number of cores."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._turns = StartTurns(placement)
        self._members: dict[str, InProcessRanks] = {}
        self._factories: dict[str, EngineFactory] = {}
        self._engines: dict[str, Engine] = {}

    async def start_members(self, role: str, make_member: MemberFactory, *, meet: bool = True) -> ActorRanks:
        seats = self._placement.seats[role]
        if meet and len(seats) > 1:
            raise ValueError(
                f"placement.roles.{role}.replicas: {len(seats)} ranks need one process each; "
                f"set cluster=ray, or placement.roles.{role}.replicas=1"
            )
        async with self._turns.one_at_a_time(seats):
            ranks = self._members[role] = await InProcessRanks.start(seats, make_member)
        return ranks

    async def restart_member(self, role: str, rank: int) -> None:
        async with self._turns.one_at_a_time([self._placement.seats[role][rank]]):
            await self._members[role].restart(rank)

    async def start_engines(self, role: str, make_engine: EngineFactory) -> dict[str, Engine]:
        self._factories[role] = make_engine
        async with self._turns.one_at_a_time(seats := self._placement.seats[role]):
            engines = {seat.name: make_engine(seat.rank) for seat in seats}
        self._engines |= engines
        return engines

    async def restart_engine(self, role: str, name: str) -> Engine:
        (seat,) = (seat for seat in self._placement.seats[role] if seat.name == name)
        async with self._turns.one_at_a_time([seat]):
            if isinstance(old := self._engines.pop(name, None), Closable):
                old.close()
            self._engines[name] = engine = self._factories[role](seat.rank)
        return engine

    @property
    def starting(self) -> Sequence[Seat]:
        return self._turns.starting

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
        for ranks in self._members.values():
            await ranks.close()
