"""Holds work back while something else changes. Knows neither."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from scheduler.clock import ActiveClock


class Hold:
    """While anybody holds, nobody passes, and a clock stands still."""

    def __init__(self, clock: ActiveClock) -> None:
        self._clock = clock
        self._num_holders = 0
        self._free = asyncio.Event()
        self._free.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Blocks may overlap."""
        self._num_holders += 1
        self._free.clear()
        try:
            with self._clock.paused():
                yield
        finally:
            self._num_holders -= 1
            if self._num_holders == 0:
                self._free.set()

    async def passed(self) -> None:
        """Return once nobody holds."""
        while self._num_holders > 0:
            await self._free.wait()
