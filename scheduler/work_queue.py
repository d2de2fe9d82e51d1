"""Bounded stages: an inbox, a concurrency and a work function. Of an item they know only its key."""

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class BusyMeter:
    """Seconds in which at least one thing runs, by the event loop's clock."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running = 0
        self._since = 0.0
        self._busy_s = 0.0

    def __enter__(self) -> None:
        if self._running == 0:
            self._since = self._loop.time()
        self._running += 1

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if self._running == 0:
            self._busy_s += self._loop.time() - self._since

    @property
    def running(self) -> int:
        return self._running

    @property
    def busy_s(self) -> float:
        return self._busy_s + (self._loop.time() - self._since if self._running else 0.0)


class StateMeter:
    """Seconds per state, with at most one state at a time, by the event loop's clock."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._state: str | None = None
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    @property
    def state(self) -> str | None:
        return self._state

    def enter(self, state: str | None) -> None:
        if state != self._state:
            self._settle()
            self._state = state

    def seconds(self, state: str) -> float:
        self._settle()
        return self._seconds.get(state, 0.0)

    def clear(self) -> None:
        """Restart the counts."""
        self._settle()
        self._seconds.clear()

    def _settle(self) -> None:
        now = self._loop.time()
        if self._state is not None:
            self._seconds[self._state] = self._seconds.get(self._state, 0.0) + now - self._since
        self._since = now


class Stage(Generic[Item]):
    """Consumes `inbox`, does `work` on up to `width` items at once, by rank. A crash of `work` ends `run`.

    `key(item)` is what an item belongs to: `cancel(key)` ends its running work. Items in the inbox are still passed to
    `work`, which must recognise those that are over.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Item], Awaitable[None]],
        key: Callable[[Item], str],
        *,
        width: int,
        bound: int,
        rank: Callable[[Item], int] = lambda item: 0,
        shared_meter: BusyMeter | None = None,
    ) -> None:
        """bound: of the inbox; 0: no limit. rank: computed when an item is put; the lowest first, equal ones in order
        of arrival.
        shared_meter: runs while any of several stages works.
        """
        self.name = name
        self.meter = BusyMeter()
        self._shared_meter = shared_meter or BusyMeter()
        self._work = work
        self._key = key
        self._free = asyncio.Semaphore(width)
        self._rank = rank
        self._arrivals = itertools.count()
        self._inbox: asyncio.PriorityQueue[tuple[int, int, Item]] = asyncio.PriorityQueue(bound)
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}

    @property
    def waiting(self) -> int:
        """The number of items in the inbox."""
        return self._inbox.qsize()

    async def put(self, item: Item) -> None:
        """Add an item. Waits while the inbox is full (backpressure)."""
        await self._inbox.put((self._rank(item), next(self._arrivals), item))

    def put_nowait(self, item: Item) -> None:
        """Add an item to an inbox without a limit."""
        self._inbox.put_nowait((self._rank(item), next(self._arrivals), item))

    async def run(self) -> None:
        try:
            await self._serve()
        except BaseExceptionGroup as crashes:
            raise crashes.exceptions[0] from None  # in order of time: later ones follow from the first

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._free.acquire()
                _, _, item = await self._inbox.get()
                task = tasks.create_task(self._do(item))
                self._tasks.setdefault(self._key(item), set()).add(task)
                # A callback, not a `finally` in the task: a task cancelled before its first step never runs its body.
                task.add_done_callback(functools.partial(self._forget, self._key(item)))

    def cancel(self, key: str) -> None:
        """End all running work on `key`, except the caller's own."""
        current = asyncio.current_task()
        for task in self._tasks.get(key, ()):
            if task is not current:
                task.cancel()

    async def _do(self, item: Item) -> None:
        with self.meter, self._shared_meter:
            await self._work(item)

    def _forget(self, key: str, task: asyncio.Task[None]) -> None:
        self._free.release()
        self._tasks[key].discard(task)
        if not self._tasks[key]:
            del self._tasks[key]
