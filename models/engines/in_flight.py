"""Requests under way in an event loop: joined by their id, let in by priority. Knows no engine and no network."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Flight(Generic[T]):
    """One request, and how many wait for its answer."""

    task: asyncio.Task[T]
    num_waiters: int = 0


class InFlight(Generic[T]):
    """A request_id that is under way gets that request's answer. The task ends with the last who waited for it."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight[T]] = {}
        self._tasks: set[asyncio.Task[T]] = set()  # an event loop itself holds tasks weakly

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._flights

    async def join(self, request_id: str, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer of `begin`, which is called unless the request is under way already."""
        flight = self._flights.get(request_id)
        if flight is None:
            flight = self._flights[request_id] = self._take_off(request_id, begin)
        flight.num_waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiters -= 1
            if flight.num_waiters == 0 and not flight.task.done():
                self._land(request_id, flight)  # who asks from now on begins anew
                flight.task.cancel()

    def _take_off(self, request_id: str, begin: Callable[[], Coroutine[Any, Any, T]]) -> Flight[T]:
        flight = Flight(asyncio.ensure_future(begin()))
        self._tasks.add(flight.task)
        flight.task.add_done_callback(lambda _: self._land(request_id, flight))
        flight.task.add_done_callback(self._tasks.discard)
        return flight

    def _land(self, request_id: str, flight: Flight[T]) -> None:
        if self._flights.get(request_id) is flight:
            del self._flights[request_id]


class Gate:
    """Lets `width` callers in at once; of those that wait, the lowest priority number first, then the oldest."""

    def __init__(self, width: int) -> None:
        self._free = width
        self._num_arrived = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def enter(self, priority: int) -> AsyncIterator[None]:
        if self._free:
            self._free -= 1
        else:
            await self._wait(priority)
        try:
            yield
        finally:
            self._let_next_in()

    async def _wait(self, priority: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_arrived += 1
        heapq.heappush(self._waiting, (priority, self._num_arrived, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._let_next_in()  # our turn had come in the very moment
            raise

    def _let_next_in(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class Sluice:
    """Holds callers back while it is closed. Opened, it lets the lowest priority number go first, then the oldest."""

    def __init__(self) -> None:
        self.is_open = True
        self._num_arrived = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    def close(self) -> None:
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)

    async def pass_through(self, priority: int) -> None:
        """Return at once, or when it opens: it may be closed again by then."""
        if not self.is_open:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._num_arrived += 1
            heapq.heappush(self._waiting, (priority, self._num_arrived, turn))
            await turn
