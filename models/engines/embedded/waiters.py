"""Calls from event loops into an engine's thread: waiters, and the way back of answers."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from grmpipe.models.engines.embedded.batch import Row
from grmpipe.models.types import Completion, EngineDied, ignore_first_token

T = TypeVar("T")


class Answer(Generic[T]):
    """A future of the running event loop that another thread settles. Once settled or cancelled, it doesn't change."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: no task waits any more
            self._loop.call_soon_threadsafe(function)

    def give(self, result: T) -> None:
        self.call(lambda: None if self.future.done() else self.future.set_result(result))

    def fail(self, error: BaseException) -> None:
        self.call(lambda: None if self.future.done() else self.future.set_exception(error))


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One call of generate."""

    answer: Answer[Completion]
    on_first_token: Callable[[], None]

    def notify_first_token(self) -> None:
        if self.on_first_token is not ignore_first_token:
            self.answer.call(self.on_first_token)


@dataclass(slots=True, eq=False)
class EmbeddedRequest:
    """A request in flight, and all its waiters."""

    request_id: str
    row: Row
    waiters: list[Waiter] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Command:
    """Work for the thread between two steps. `fail` tells the caller that it won't be done."""

    run: Callable[[], None]
    fail: Callable[[BaseException], None]


def copy_death(death: EngineDied) -> EngineDied:
    """A copy of an exception: each waiter gets its own, because tracebacks grow on it."""
    copy = EngineDied(str(death))
    copy.__cause__ = death.__cause__
    return copy
