"""The event loop of a process that runs a user's code: its end waits for no thread, and briefly for tasks. Plus limits
that hold for code which ignores its cancellation.
"""

import asyncio
import ctypes
import logging
from asyncio.tasks import _unregister_task  # in asyncio's documentation of "task lifetime"
from collections.abc import Awaitable, Collection, Coroutine
from typing import TypeVar

from grmpipe.scheduler.daemon_threads import DaemonThreads

log = logging.getLogger(__name__)

T = TypeVar("T")
END_S = 3.0  # for cancelled tasks to end
CANCEL_S = 1.0  # for a call whose time is up to end by itself


class TimeIsUp(Exception):
    """The limit of `within` passed."""


def run_to_end(main: Coroutine[object, object, T]) -> T:
    """`asyncio.run`, whose end is not held up by what a user's code left behind: threads, and tasks that ignore their
    cancellation.
    """
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(DaemonThreads())
        return runner.run(_ending_others(main))


async def _ending_others(main: Coroutine[object, object, T]) -> T:
    try:
        return await main
    finally:
        await _end(asyncio.all_tasks() - {asyncio.current_task()})


async def _end(tasks: Collection[asyncio.Task[object]]) -> None:
    """Cancel the tasks. Those that are still there after END_S are forgotten: a Runner would wait for them for ever."""
    if not tasks:
        return
    for task in tasks:
        task.cancel()
    _, left = await asyncio.wait(tasks, timeout=END_S)
    for task in left:
        log.warning("a task ignored its cancellation for %g s, and is left behind: %s", END_S, where(task))
        _unregister_task(task)
        # Never freed: Python would ask its coroutine to end once more, in which it may loop for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def where(task: asyncio.Task[object]) -> str:
    """The function, file and line in which a task waits."""
    frames = task.get_stack()
    if not frames:
        return task.get_name()
    code = frames[-1].f_code
    return f"{code.co_qualname} ({code.co_filename}:{frames[-1].f_lineno})"


async def within(limit_s: float, doing: Awaitable[T], name: str) -> T:
    """The result of something that a user wrote. Raises what it raises, and TimeIsUp after limit_s, also if it ignores
    its cancellation: then it is left behind.

    name: its task's, for logs.
    """
    task = asyncio.create_task(_caught(doing), name=name)
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        await _leave(task)
        raise
    if not done:
        await _leave(task)
        raise TimeIsUp
    if task.cancelled():
        raise RuntimeError("it cancelled its own task")
    result, error = task.result()
    if error is not None:
        raise error
    assert result is not None
    return result[0]


async def _caught(doing: Awaitable[T]) -> tuple[tuple[T] | None, BaseException | None]:
    """The result in a tuple, or what was raised: a task that raises SystemExit itself would end the event loop."""
    try:
        return (await doing,), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


async def _leave(task: asyncio.Task[object]) -> None:
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=CANCEL_S)
    if not done:
        log.warning("%s ignores that its time is up, and is left behind: %s", task.get_name(), where(task))
