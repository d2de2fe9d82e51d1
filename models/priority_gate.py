"""Callers that wait for their turn, in order of priority. Decides nothing: whoever owns a gate lets them through."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

Permit = asyncio.Future[None]


def keep() -> None:
    """The default for `give_back`: a turn is nothing that anybody else could use."""


class PriorityGate:
    """The lowest priority number goes first, then the oldest. Whoever is cancelled leaves."""

    def __init__(self) -> None:
        self._num_arrived = 0
        self._waiting: list[tuple[int, int, int, Permit]] = []

    @property
    def first_amount(self) -> int | None:
        """What the next one to go asks for; None where nobody waits."""
        while self._waiting:
            *_, amount, turn = self._waiting[0]
            if not turn.done():
                return amount
            heapq.heappop(self._waiting)
        return None

    def join(self, priority: int, amount: int = 0) -> Permit:
        """Take a place, to be waited for by `passed`."""
        turn: Permit = asyncio.get_running_loop().create_future()
        self._num_arrived += 1
        heapq.heappush(self._waiting, (priority, self._num_arrived, amount, turn))
        return turn

    async def passed(self, turn: Permit, give_back: Callable[[], object] = keep) -> None:
        """Return when it is let through. give_back: called where its caller is cancelled in that very moment."""
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                give_back()
            raise

    async def wait(self, priority: int, give_back: Callable[[], object] = keep) -> None:
        await self.passed(self.join(priority), give_back)

    def let_one(self) -> bool:
        """The first of those that wait. False where nobody does."""
        if self.first_amount is None:
            return False
        *_, turn = heapq.heappop(self._waiting)
        turn.set_result(None)
        return True

    def let_all(self) -> None:
        """All that wait now, in their order."""
        while self.let_one():
            pass
