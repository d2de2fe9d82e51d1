"""Callers that wait in order of priority."""

import asyncio
import heapq
from collections.abc import Callable

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
