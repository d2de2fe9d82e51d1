"""Capacity for episodes: slots, booked for a whole group at once and given back one by one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from grmpipe.envs.play import Play, RolloutRequest
from grmpipe.types import Prompt, Rollout


class EpisodeSlots:
    """A number of episodes that may be open at the same time; None: no limit.

    Bookings are served in their order, so that a large one isn't overtaken for ever by small ones.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._num_booked = 0
        self._waiting: deque[tuple[int, asyncio.Event]] = deque()
        self.num_open = 0

    async def book(self, count: int) -> Booking:
        """Wait for `count` free slots, and take them all."""
        assert self.capacity is None or count <= self.capacity, f"{count} of {self.capacity} slots"
        if self._waiting or not self._fits(count):
            turn = asyncio.Event()
            self._waiting.append((count, turn))
            try:
                await turn.wait()
            except BaseException:
                self._leave(count, turn)
                raise
        else:
            self._num_booked += count
        return Booking(self, count)

    @property
    def num_waiting(self) -> int:
        """Bookings that wait for room."""
        return len(self._waiting)

    def _fits(self, count: int) -> bool:
        return self.capacity is None or self._num_booked + count <= self.capacity

    def _leave(self, count: int, turn: asyncio.Event) -> None:
        """Give up waiting; a booking that was just granted is given back."""
        if turn.is_set():
            self.give_back(count)
        else:
            self._waiting.remove((count, turn))
            self._admit()

    def give_back(self, count: int) -> None:
        self._num_booked -= count
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            count, turn = self._waiting.popleft()
            self._num_booked += count
            turn.set()


class Booking:
    """EpisodeSlots that were booked together. As a context it uses one and gives it back, for several episodes at once;
    `end` gives back those never used.
    """

    def __init__(self, slots: EpisodeSlots, count: int) -> None:
        self._slots = slots
        self._num_free = count

    async def __aenter__(self) -> None:
        assert self._num_free > 0, "more episodes than slots"
        self._num_free -= 1
        self._slots.num_open += 1

    async def __aexit__(self, *_: object) -> None:
        self._slots.num_open -= 1
        self._slots.give_back(1)

    def keep(self, count: int) -> None:
        """Give back all but `count` of those that aren't used."""
        self._num_free, left_over = count, self._num_free - count
        if left_over:
            self._slots.give_back(left_over)

    def end(self) -> None:
        self.keep(0)


def in_own_slot(play: Play, slots: EpisodeSlots) -> Play:
    """A play that books its own slot, for an episode of no group."""

    async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        booking = await slots.book(1)
        async with booking:
            return await play(request, prompt, on_first_token)

    return played
