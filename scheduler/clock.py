"""The clock of deadlines (the event loop's clock without pauses), and the gate of a pause. No wall clock."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from types import TracebackType

RESOLUTION_S = 1e-6  # a shorter sleep may not advance the clock


class ActiveClock:
    """A clock that stands still while weights are pushed, judging is paused or dead engines are replaced: such waiting
    counts against no deadline.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped_s = 0.0  # in finished pauses
        self._pauses = 0
        self._paused_at = 0.0
        self._going = asyncio.Event()
        self._going.set()
        self._limits: dict[asyncio.Timeout, float] = {}  # -> when they end, in active seconds

    def now(self) -> float:
        """Active seconds, from an arbitrary origin."""
        at = self._paused_at if self._pauses else self._loop.time()
        return at - self._stopped_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock for the time of a block. Blocks may overlap."""
        if self._pauses == 0:
            self._paused_at = self._loop.time()
            self._going.clear()
        self._pauses += 1
        self._set_limits()
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._stopped_s += self._loop.time() - self._paused_at
                self._going.set()
                self._set_limits()

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[None]:
        """`asyncio.timeout` in active seconds. Raises TimeoutError."""
        return _ActiveTimeout(self, seconds)

    def limit(self, limit: asyncio.Timeout, seconds: float | None) -> None:
        """Let a limit end after active seconds; None: it is over, and isn't kept up any more."""
        if seconds is None:
            del self._limits[limit]
        else:
            self._limits[limit] = self.now() + seconds
            self._set_limit(limit)

    def _set_limits(self) -> None:
        for limit in self._limits:
            self._set_limit(limit)

    def _set_limit(self, limit: asyncio.Timeout) -> None:
        if not limit.expired():
            left_s = self._limits[limit] - self.now()
            limit.reschedule(None if self._pauses else self._loop.time() + left_s)

    async def sleep_until(self, when: float) -> None:
        """Return once `now()` has reached `when`."""
        while True:
            await self._going.wait()
            left = when - self.now()
            if left < RESOLUTION_S:
                return
            await asyncio.sleep(left)


class _ActiveTimeout:
    """`ActiveClock.timeout`."""

    def __init__(self, clock: ActiveClock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._clock.limit(self._limit, self._seconds)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.limit(self._limit, None)
        await self._limit.__aexit__(kind, error, trace)


class Standstill:
    """Clocks that stand still together, while something lasts."""

    def __init__(self) -> None:
        self._clocks: list[ActiveClock] = []
        self._stopped: ExitStack | None = None

    def add(self, clock: ActiveClock) -> None:
        self._clocks.append(clock)
        if self._stopped is not None:
            self._stopped.enter_context(clock.pause())

    def set(self, stopped: bool) -> None:
        """Stop the clocks, or let them go on."""
        if stopped and self._stopped is None:
            self._stopped = ExitStack()
            for clock in self._clocks:
                self._stopped.enter_context(clock.pause())
        elif not stopped and self._stopped is not None:
            self._stopped.close()
            self._stopped = None


class PauseGate:
    """A gate that nothing passes while it is held; a clock stands still meanwhile."""

    def __init__(self, clock: ActiveClock) -> None:
        self._clock = clock
        self._num_holders = 0
        self._free = asyncio.Event()
        self._free.set()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Context: hold the gate. Blocks may overlap."""
        self._num_holders += 1
        self._free.clear()
        try:
            with self._clock.pause():
                yield
        finally:
            self._num_holders -= 1
            if self._num_holders == 0:
                self._free.set()

    async def wait_until_free(self) -> None:
        """Return once the gate isn't held."""
        while self._num_holders > 0:
            await self._free.wait()
