"""Turns Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 into an orderly end of a run, as an interruption. Stops nothing itself."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import NoReturn

LEAVE_AFTER_S = 2.0
# A scheduler, a closed terminal, Slurm's srun (which passes on USR1, but kills its tasks at a TERM). asyncio has Ctrl-C
# until a run asks.
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

_end: ContextVar[Callable[[], object] | None] = ContextVar("_end", default=None)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Context: SIGTERM, SIGHUP and SIGUSR1 cancel the current task, as asyncio.run does on Ctrl-C; a second signal
    ends the process at once. It covers the start of a run, which may take minutes.
    """
    task = asyncio.current_task()
    assert task is not None, "signals end a task"
    token = _end.set(task.cancel)
    silence = _listen(ENDING, task.cancel)
    try:
        yield
    finally:
        silence()
        _end.reset(token)


@contextmanager
def asked_to_stop(stop: Callable[[], None]) -> Iterator[None]:
    """Context: the first signal, including Ctrl-C, calls `stop`, which leads to a checkpoint; the second ends the
    process at once, without one. Afterwards the earlier handlers are back.
    """

    def first() -> None:
        signal.signal(signal.SIGINT, _leave)
        stop()

    silence = _listen((signal.SIGINT, *ENDING), first)
    try:
        yield
    finally:
        silence()
        if (end := _end.get()) is not None:
            _listen(ENDING, end)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End the process after a moment in which others can end. Ray alone may take ten seconds, and also ends without
    us.
    """
    last = threading.Timer(LEAVE_AFTER_S, os._exit, (130,))
    last.daemon = True
    last.start()
    raise KeyboardInterrupt


def _listen(numbers: Sequence[signal.Signals], call: Callable[[], object]) -> Callable[[], None]:
    """Call `call` at the first of these signals. An ignored signal (nohup) stays ignored. Returns a function that ends
    this.
    """
    loop = asyncio.get_running_loop()
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

    def silence() -> None:
        for number in handled:
            loop.remove_signal_handler(number)

    def first() -> None:
        silence()
        call()

    for number in handled:
        loop.add_signal_handler(number, first)
    return silence
