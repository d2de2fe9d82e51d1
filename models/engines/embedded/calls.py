"""Calls from event loops into an engine's thread: who waits, and how answers travel back. Runs no loop or thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from models.engines.embedded.batch import Row
from models.types import Completion, EngineDied, ignore_first_token

T = TypeVar("T")


class Answer(Generic[T]):
    """A future of the running event loop that another thread settles; once settled or cancelled, it stays so."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
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

    def tell_first_token(self) -> None:
        if self.on_first_token is not ignore_first_token:
            self.answer.call(self.on_first_token)


@dataclass(slots=True, eq=False)
class EmbeddedRequest:
    """A request in flight, and all who wait for it."""

    request_id: str
    row: Row
    waiters: list[Waiter] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Command:
    """What the thread does between two steps. `fail` tells the caller that it won't be done."""

    run: Callable[[], None]
    fail: Callable[[BaseException], None]


def copy_of(death: EngineDied) -> EngineDied:
    """Each who waits gets an exception of its own: tracebacks grow on it."""
    copy = EngineDied(str(death))
    copy.__cause__ = death.__cause__
    return copy
