"""Time as deadlines see it: the event loop's clock, less the pauses. No wall clock, so a virtual loop drives it too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

RESOLUTION_S = 1e-6  # a shorter sleep may not move the clock at all


class ActiveClock:
    """Stands still while weights sync or judging is paused: waiting that is nobody's fault costs no deadline."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped_s = 0.0  # by finished pauses
        self._pauses = 0
        self._paused_at = 0.0
        self._going = asyncio.Event()
        self._going.set()

    def now(self) -> float:
        """Active seconds, from an arbitrary origin."""
        at = self._paused_at if self._pauses else self._loop.time()
        return at - self._stopped_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for the time of a block. Blocks may overlap."""
        if self._pauses == 0:
            self._paused_at = self._loop.time()
            self._going.clear()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._stopped_s += self._loop.time() - self._paused_at
                self._going.set()

    async def sleep_until(self, when: float) -> None:
        """Return once `now()` has reached `when`."""
        while True:
            await self._going.wait()
            left = when - self.now()
            if left < RESOLUTION_S:
                return
            await asyncio.sleep(left)
