"""Begins the calls of a process in the order in which they were made, in any order of arrival."""

import asyncio


class OrderedHost:
    """An async actor whose calls have numbers. Calls in progress may overlap; no number may be left out."""

    def __init__(self) -> None:
        self._next_number = 0
        self._early: dict[int, asyncio.Future[None]] = {}  # number -> call that arrived early

    async def call_in_order(self, number: int, method: str, *args: object) -> object:
        """number: counts all calls of one caller, from 0."""
        await self._turn(number)
        return await getattr(self, method)(*args)

    async def _turn(self, number: int) -> None:
        if number != self._next_number:
            early = self._early[number] = asyncio.get_running_loop().create_future()
            await early
        self._next_number += 1
        if (follower := self._early.pop(self._next_number, None)) is not None:
            follower.set_result(None)
