"""Functions that may block, in daemon threads: none waits for a stuck one, and none keeps the process from its end."""

import asyncio
import contextvars
import functools
import inspect
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
MAX_STUCK = 256  # calls of one function that were given up and still run
MAX_THREADS = 512  # in an executor


class TooManyStuck(RuntimeError):
    """Earlier calls of the function were given up, and still run: no thread can be ended from outside."""


class DaemonThreads(ThreadPoolExecutor):
    """asyncio's default executor for a process that user's code may block: it starts a thread whenever all are busy,
    and its end waits for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._jobs: deque[Callable[[], None]] = deque()
        self._num_busy = 0
        self._lock = threading.Lock()

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._jobs.append(functools.partial(_fill, future, functools.partial(call, *args, **kwargs)))
            if starts := self._num_busy < MAX_THREADS:
                self._num_busy += 1
        if starts:
            threading.Thread(target=self._work, name="default-executor", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._num_busy -= 1
                    return
                job = self._jobs.popleft()
            job()


class _Stuck:
    """The numbers of calls that were given up and still run, by function."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, place: str, number: int) -> int:
        with self._lock:
            self._numbers[place] += number
            return self._numbers[place]

    def check(self, place: str) -> None:
        if self._numbers[place] >= MAX_STUCK:
            raise TooManyStuck(
                f"{MAX_STUCK} earlier calls of {place} never ended, and a thread can't be ended from outside"
            )


_stuck = _Stuck()


async def in_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function that may block, which begins at once in a daemon thread of its own.

    Whoever cancels this (a time limit) leaves the thread behind. Raises what the function raises (a RuntimeError for
    what ends processes, such as SystemExit), and TooManyStuck if MAX_STUCK calls of this function were left behind.
    """
    place = describe_place(function)
    _stuck.check(place)
    call = functools.partial(contextvars.copy_context().run, functools.partial(function, *args, **kwargs))
    future: Future[T] = Future()
    threading.Thread(target=_fill, args=(future, call, place), name=f"call of {place}", daemon=True).start()
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.done():  # a running call refuses to be cancelled
            number = _stuck.add(place, 1)
            future.add_done_callback(lambda ended: _stuck.add(place, -1))
            level = logging.WARNING if number.bit_count() == 1 else logging.INFO  # 1, 2, 4, 8, .. are for the console
            log.log(level, "a call of %s was given up; its thread runs on (calls like that: %d)", place, number)
        raise


def describe_place(function: Callable[..., object]) -> str:
    """A function's name, file and line, for those who wrote it."""
    plain = inspect.unwrap(function)
    if not inspect.isfunction(plain):
        return repr(function)
    code = plain.__code__
    return f"{plain.__module__}.{plain.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def _fill(future: Future[T], call: Callable[[], T], place: str = "") -> None:
    """Run the call, unless it was cancelled before, and put its result or exception into the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(_passed_on(error, place))
    else:
        future.set_result(result)


def _passed_on(error: BaseException, place: str) -> BaseException:
    """The exception that a task may raise: no future takes a StopIteration, and SystemExit would end the event loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{place or 'a call in a thread'} raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
