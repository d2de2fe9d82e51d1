"""Runs loops together; the first crash ends all of them, with its cause."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from grmpipe.models.types import EngineDenied

T = TypeVar("T")
U = TypeVar("U")
MAIN = "the main loop"  # its failures need no note: the caller knows what it runs


async def run_together(**loops: Coroutine[object, object, T]) -> dict[str, T]:
    """Run all loops to their end; return their results by name. Cancellation reaches all of them.

    The first exception cancels the rest and is raised itself, with a note that names its loop: errors of the others
    during their cancellation are not the cause.
    """
    async with _supervised(loops) as (tasks, _):
        if tasks:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
    return {name: task.result() for name, task in tasks.items()}


async def run_until(main: Coroutine[object, object, U], /, **loops: Coroutine[object, object, object]) -> U:
    """Run the loops until `main` returns, then cancel them and return its result. Crashes as in run_together."""
    async with _supervised({**loops, MAIN: main}) as (tasks, failures):
        pending = set(tasks.values())
        while not failures and not tasks[MAIN].done():
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    return tasks[MAIN].result()  # type: ignore[return-value]


class RemoteTraceback(Exception):
    """The place in another process, `where`, at which an error was raised; the cause of the error itself."""

    def __init__(self, where: str, trace: str) -> None:
        super().__init__(f"in {where}:\n{trace}")
        self.where = where


def describe_failure(error: BaseException) -> str:
    """The first cause in plain words, one line each: where (outermost first), what, and what caused it. What is said to
    users needs no traceback of another process: the logs have it.
    """
    notes = list(reversed(getattr(error, "__notes__", [])))
    while isinstance(error, BaseExceptionGroup):  # in the order in which they were raised
        error = error.exceptions[0]
        notes += reversed(getattr(error, "__notes__", []))
    lines = [*notes, _words(error)]
    cause = error.__cause__
    while cause is not None:
        if isinstance(cause, RemoteTraceback) and is_for_users(error):
            lines.append(f"(in {cause.where})")
        elif str(cause) not in lines[-1]:
            lines.append(f"because of {_words(cause)}")
        cause = cause.__cause__
    return "\n".join(lines)


@asynccontextmanager
async def raise_first_failure() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first failure is raised itself, not in an exception group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__


@asynccontextmanager
async def _supervised(
    loops: Mapping[str, Coroutine[object, object, T]],
) -> AsyncIterator[tuple[dict[str, asyncio.Task[T]], list[BaseException]]]:
    """Context: the loops as tasks, and their failures in the order of time. At its end all are ended, and the first
    failure is raised.
    """
    failures: list[BaseException] = []
    tasks = {name: asyncio.create_task(_watch(name, loop, failures), name=name) for name, loop in loops.items()}
    try:
        yield tasks, failures
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    if failures:
        raise failures[0]


async def _watch(name: str, loop: Coroutine[object, object, T], failures: list[BaseException]) -> T:
    try:
        return await loop
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Something that the loop awaited was cancelled: otherwise the loop would end unnoticed.
        crash = RuntimeError("it was cancelled from within")
        _note(crash, name)
        failures.append(crash)
        raise crash from error
    except Exception as error:
        _note(error, name)
        failures.append(error)
        raise


def _note(error: Exception, name: str) -> None:
    if name != MAIN:
        error.add_note(f"in {name}:")


def _words(error: BaseException) -> str:
    """The error in words: some messages are for users; other errors also need the name of their type."""
    return str(error) if is_for_users(error) else f"{type(error).__name__}: {error}"


def is_for_users(error: BaseException) -> bool:
    return type(error) is ValueError or isinstance(error, EngineDenied)
