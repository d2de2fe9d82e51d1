"""Ctrl-C, SIGTERM and SIGHUP, made an orderly end of a run: as an interruption. Stops nothing itself."""

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
ENDING = (signal.SIGTERM, signal.SIGHUP)  # a scheduler, a closed terminal; Ctrl-C is asyncio's own until a run asks

_end: ContextVar[Callable[[], object] | None] = ContextVar("_end", default=None)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP cancel the task that this stands in, as asyncio.run does on Ctrl-C; a second one ends the
    process at once. From here on, so that a start that takes minutes can be ended, too.
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
    """The first signal, Ctrl-C as well, calls `stop`, which sees to a checkpoint; the second ends the process at once,
    without. Afterwards signals mean what they meant before."""

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
    """Processes get a moment to be ended in; Ray alone may take ten seconds, and ends them without us as well."""
    last = threading.Timer(LEAVE_AFTER_S, os._exit, (130,))
    last.daemon = True
    last.start()
    raise KeyboardInterrupt


def _listen(numbers: Sequence[signal.Signals], call: Callable[[], object]) -> Callable[[], None]:
    """The first of these signals calls `call`. One that is ignored (nohup) stays so. Returns its end."""
    loop = asyncio.get_running_loop()
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

    def silence() -> None:
        for number in heard:
            loop.remove_signal_handler(number)

    def first() -> None:
        silence()
        call()

    for number in heard:
        loop.add_signal_handler(number, first)
    return silence
