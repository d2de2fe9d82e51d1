"""Callers that wait in an event loop: admitted by priority, or joined by the id of what they ask for."""

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Permit = asyncio.Future[None]


def keep() -> None:
    """The default for `give_back`: nothing has to be given back."""


class PriorityGate:
    """A gate that releases the lowest priority number first, then the oldest. Cancelled waiters leave."""

    def __init__(self) -> None:
        self._num_arrived = 0
        self._waiting: list[tuple[int, int, int, Permit]] = []

    @property
    def first_amount(self) -> int | None:
        """The amount that the next waiter asks for; None without waiters."""
        while self._waiting:
            *_, amount, turn = self._waiting[0]
            if not turn.done():
                return amount
            heapq.heappop(self._waiting)
        return None

    def join(self, priority: int, amount: int = 0) -> Permit:
        """Take a place; wait for it with `wait_for_turn`."""
        turn: Permit = asyncio.get_running_loop().create_future()
        self._num_arrived += 1
        heapq.heappush(self._waiting, (priority, self._num_arrived, amount, turn))
        return turn

    async def wait_for_turn(self, turn: Permit, give_back: Callable[[], object] = keep) -> None:
        """Return when released. give_back: called if the caller is cancelled at the moment of its release."""
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                give_back()
            raise

    async def wait(self, priority: int, give_back: Callable[[], object] = keep) -> None:
        await self.wait_for_turn(self.join(priority), give_back)

    def let_one(self) -> bool:
        """Release the first waiter. Returns False if there is none."""
        if self.first_amount is None:
            return False
        *_, turn = heapq.heappop(self._waiting)
        turn.set_result(None)
        return True

    def let_all(self) -> None:
        """Release all present waiters, in their order."""
        while self.let_one():
            pass


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Flight(Generic[T]):
    """One request, and the number of its waiters."""

    task: asyncio.Task[T]
    num_waiters: int = 0


class SingleFlight(Generic[T]):
    """A request_id in progress gets that request's answer. The task ends with its last waiter."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight[T]] = {}
        self._tasks: set[asyncio.Task[T]] = set()  # an event loop holds tasks only weakly

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._flights

    async def join(self, request_id: str, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer of `begin`, which is called unless the request is in progress."""
        flight = self._flights.get(request_id)
        if flight is None:
            flight = self._flights[request_id] = self._take_off(request_id, begin)
        flight.num_waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiters -= 1
            if flight.num_waiters == 0 and not flight.task.done():
                self._land(request_id, flight)  # later calls begin again
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


class PrioritySemaphore:
    """Admits `width` callers at once; of the waiting, the lowest priority number first, then the oldest."""

    def __init__(self, width: int) -> None:
        self._free = width
        self._waiting = PriorityGate()

    def enter(self, priority: int) -> AbstractAsyncContextManager[None]:
        """Context of an admitted caller."""
        return _Admission(self, priority)

    async def until_admitted(self, priority: int) -> None:
        if self._free:
            self._free -= 1
        else:
            await self._waiting.wait(priority, self.let_next_in)

    def let_next_in(self) -> None:
        if not self._waiting.let_one():
            self._free += 1


@dataclass(slots=True, eq=False)
class _Admission:
    """`PrioritySemaphore.enter`."""

    gate: PrioritySemaphore
    priority: int

    async def __aenter__(self) -> None:
        await self.gate.until_admitted(self.priority)

    async def __aexit__(self, *_: object) -> None:
        self.gate.let_next_in()


class AdmissionGate:
    """Blocks callers while it is closed. When opened, it admits the lowest priority number first, then the oldest."""

    def __init__(self) -> None:
        self.is_open = True
        self._waiting = PriorityGate()

    def close(self) -> None:
        self.is_open = False

    def open(self) -> None:
        self.is_open = True
        self._waiting.let_all()

    async def pass_through(self, priority: int) -> None:
        """Return at once if open, or when it opens; it may be closed again by then."""
        if not self.is_open:
            await self._waiting.wait(priority)
