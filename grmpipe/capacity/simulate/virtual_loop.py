"""An event loop on a virtual clock: when nothing is ready, time jumps to the next timer."""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class NothingWillHappen(RuntimeError):
    """Every task waits and there is no timer: on a virtual clock nothing can wake them."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on a virtual clock: `time()` starts at 0, and moves only while nothing is ready."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._now_s

    def run_in_executor(self, executor: object, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Work of a thread is done at once: it takes no virtual time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def jump(self, seconds: float) -> None:
        """Move the clock, at least by one unit of rounding, so that a due timer is reached."""
        self._now_s = max(math.nextafter(self._now_s, math.inf), self._now_s + seconds)
        # asyncio runs timers that are due within its resolution. Late in a long run 1 ns is lost in rounding: it would
        # spin.
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._now_s))


class _Jump(selectors.SelectSelector):
    """A selector that moves the virtual clock to the next timer instead of sleeping."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingWillHappen("every task waits for another one, and no timer runs")
        if timeout > 0:
            self._loop.jump(timeout)
        return []


def run_virtually(main: Callable[[], Coroutine[object, object, T]]) -> T:
    """Run a coroutine to its end on its own virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
