"""Turns Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 into an orderly end of a run, as an interruption.

The handlers are Python's own: asyncio's wait for the event loop, which a user's code may block.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

LEAVE_AFTER_S = 2.0
# A scheduler, a closed terminal, Slurm's srun (which passes on USR1, but kills its tasks at a TERM).
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LEAVING = b"\ngrmpipe: a second Ctrl-C: leaving at once, without a checkpoint; the last one is kept\n"
# What the first signal does: before and after the flow of a run, and between its steps.
ENDS_NOW = "the run ends now, without a further checkpoint"
ENDS_WITH_CHECKPOINT = "the run ends with a checkpoint; an optimizer step that has begun is finished first"
SECOND = "; a second Ctrl-C ends it at once"


@dataclass(frozen=True, slots=True)
class StopRequest:
    """How the first signal stops a run: what it calls, and what that does."""

    ask: Callable[[], None]
    effect: str


STOPS: dict[int, StopRequest] = {}  # thread -> of a run there


@contextmanager
def end_by_signals() -> Iterator[None]:
    """Context: the first signal cancels the current task, the second ends the process at once. It covers the start of a
    run, which may take minutes. Raises KeyboardInterrupt where the cancelled task does nothing about it.
    """
    task = asyncio.current_task()
    assert task is not None, "signals end a task"
    with stop_by_signals(task.cancel, ENDS_NOW) as stopped:
        try:
            yield
        except asyncio.CancelledError:
            if stopped.is_set():
                raise KeyboardInterrupt from None
            raise


@contextmanager
def stop_by_signals(stop: Callable[[], object], effect: str = ENDS_WITH_CHECKPOINT) -> Iterator[threading.Event]:
    """Context: the first signal says what happens (`effect`), and calls `stop` in the event loop; the second ends the
    process at once, also where a user's code blocks the loop. An ignored signal (nohup) stays ignored. Outside the main
    thread, where no signals come, only `ask_to_stop` does it. Gives whether one came.

    Afterwards the earlier handlers are back; a second Ctrl-C still ends the process.
    """
    loop, stopped, thread = asyncio.get_running_loop(), threading.Event(), threading.get_ident()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    in_main = threading.current_thread() is threading.main_thread()  # signals come nowhere else
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN and in_main]

    def ask() -> None:
        stopped.set()
        loop.call_soon_threadsafe(stop)

    def first(number: int, frame: FrameType | None) -> None:
        os.write(2, f"\ngrmpipe: {signal.Signals(number).name}: {effect}{SECOND}\n".encode())
        for each in handled:
            signal.signal(each, _leave if each == signal.SIGINT else signal.SIG_DFL)
        ask()

    for each in handled:
        signal.signal(each, first)
    outer = STOPS.get(thread)
    STOPS[thread] = StopRequest(ask, effect)
    try:
        yield stopped
    finally:
        STOPS.pop(thread)
        if outer is not None:
            STOPS[thread] = outer
        for each in handled:
            if not (each == signal.SIGINT and stopped.is_set()):
                signal.signal(each, before[each] or signal.SIG_DFL)


def ask_to_stop(thread: int) -> str | None:
    """Stop the run in a thread, as the first signal stops one in the main thread. Returns what that does; None if no
    run is there yet.
    """
    if (stop := STOPS.get(thread)) is None:
        return None
    stop.ask()
    return stop.effect


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End the process after a moment in which others can end. Ray alone may take ten seconds, and also ends without
    us.
    """
    os.write(2, LEAVING)
    last = threading.Timer(LEAVE_AFTER_S, os._exit, (130,))
    last.daemon = True
    last.start()
    raise KeyboardInterrupt
