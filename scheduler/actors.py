"""A plain class as a group of actors, and where engines come from: the protocols, and both in this process. No Ray."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from models.types import Engine
from scheduler.placement import Placement

# (rank, world_size, init_method) -> the member; init_method is what torch.distributed takes, None for a lone rank.
MemberFactory = Callable[[int, int, str | None], object]
EngineFactory = Callable[[], Engine]  # called on the event loop that will drive the engine


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

    async def start_engines(self, role: str, make_engine: EngineFactory) -> dict[str, Engine]:
        """One engine per replica of the role, under names such as `policy-0`."""
        ...

    async def shutdown(self) -> None: ...


@runtime_checkable
class Closable(Protocol):
    """An engine that holds a thread or a process and wants to hear when the run ends."""

    def close(self) -> None: ...


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
            raise IndexError(f"{self._name} is alone in its group; there is no rank {rank}")
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
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


class InProcessCluster:
    """Everything in this process, for tests and debuggers. Slots are not held against the machine's cores."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._groups: list[InProcessGroup] = []
        self._engines: list[Engine] = []

    async def start_group(self, role: str, make_member: MemberFactory) -> ActorGroup:
        seats = self._placement.seats[role]
        if len(seats) > 1:
            raise ValueError(
                f"placement.roles.{role}.replicas: {len(seats)} ranks need a process each; "
                f"set cluster=ray, or placement.roles.{role}.replicas=1"
            )
        group = await InProcessGroup.start(seats[0].name, make_member)
        self._groups.append(group)
        return group

    async def start_engines(self, role: str, make_engine: EngineFactory) -> dict[str, Engine]:
        engines = {seat.name: make_engine() for seat in self._placement.seats[role]}
        self._engines.extend(engines.values())
        return engines

    async def shutdown(self) -> None:
        for engine in self._engines:
            if isinstance(engine, Closable):
                engine.close()
        for group in self._groups:
            await group.close()
