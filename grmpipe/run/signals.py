"""Turns Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 into an orderly end of a run, as an interruption; ends the process,
also one whose threads never end.

The handlers are Python's own: asyncio's wait for the event loop, which a user's code may block.
"""

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import NoReturn

LEAVE_AFTER_S = 2.0
# `timeout` and wrappers that pass signals on send one to the process and to its group; systemd may add a SIGHUP.
ONE_SIGNAL_S = 0.5
# Ctrl-C, a scheduler, a closed terminal, Slurm's srun (which passes on USR1, but kills its tasks at a TERM).
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
LEAVING = b"\ngrmpipe: a second signal: leaving at once, without a checkpoint; the last one is kept\n"
# What the first signal does: before and after the flow of a run, between its steps, and after its end.
ENDS_NOW = "the run ends now, without a further checkpoint"
ENDS_WITH_CHECKPOINT = "the run ends with a checkpoint; an optimizer step that has begun is finished first"
HAS_ENDED = "the run has ended, and ends its processes"
SECOND = "; a second one ends it at once"


class StopRequest:
    """The request to stop one run, by a signal or by another thread. What it does follows from where the run is; one
    that comes before a stage of the run is met when the stage begins.
    """

    def __init__(self) -> None:
        self._stages: list[tuple[Callable[[], object], str]] = []  # the innermost one is the last
        self._came_s: float | None = None

    @property
    def came(self) -> bool:
        return self._came_s is not None

    def ask(self) -> str:
        """Stop the run, from any thread, once. Returns what that does."""
        stop, effect = self._stages[-1] if self._stages else (lambda: None, ENDS_NOW)
        if not self.came:
            self._came_s = time.monotonic()
            stop()
        return effect

    @contextmanager
    def stage(self, stop: Callable[[], object], effect: str) -> Iterator[None]:
        """Context in which the request calls `stop` in the event loop that runs here."""
        loop = asyncio.get_running_loop()
        self._stages.append((lambda: loop.call_soon_threadsafe(stop), effect))
        try:
            if self.came:
                stop()
            yield
        finally:
            self._stages.pop()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals: the first one stops the run, another one the process, also where a user's code
        blocks the event loop.
        """
        if self._came_s is None:
            effect = self._stages[-1][1] if self._stages else ENDS_NOW
            os.write(2, f"\ngrmpipe: {signal.Signals(number).name}: {effect}{SECOND}\n".encode())
            self.ask()
            if not self._stages:
                raise KeyboardInterrupt
        elif time.monotonic() - self._came_s > ONE_SIGNAL_S:
            leave_soon()


_request: ContextVar[StopRequest | None] = ContextVar("request", default=None)


@contextmanager
def stoppable(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Context of a run from its first check to its end: signals, or the given request from another thread, stop it.
    Before the run has an event loop a signal raises KeyboardInterrupt.

    Within another such context it is that one. An ignored signal (nohup) stays ignored; outside the main thread none
    comes. Afterwards the earlier handlers are back.
    """
    if (outer := _request.get()) is not None:
        yield outer
        return
    request = request or StopRequest()
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, request.handle)
    reset = _request.set(request)
    try:
        yield request
    finally:
        _request.reset(reset)
        for number, handler in handled.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def end_by_signals() -> Iterator[StopRequest]:
    """Context: a request to stop cancels the current task. It covers the start of a run, which may take minutes. Raises
    KeyboardInterrupt where the cancelled task does nothing about it.
    """
    task = asyncio.current_task()
    assert task is not None, "signals end a task"
    with stoppable() as request, request.stage(task.cancel, ENDS_NOW):
        try:
            yield request
        except asyncio.CancelledError:
            if request.came:
                raise KeyboardInterrupt from None
            raise


@contextmanager
def stop_by_signals(stop: Callable[[], object], effect: str = ENDS_WITH_CHECKPOINT) -> Iterator[None]:
    """Context: a request to stop calls `stop` in the event loop."""
    with stoppable() as request, request.stage(stop, effect):
        yield


def leave_soon() -> None:
    """End the process after a moment in which others can end. Ray alone may take ten seconds, and also ends without
    us.
    """
    os.write(2, LEAVING)
    last = threading.Timer(LEAVE_AFTER_S, os._exit, (130,))
    last.daemon = True
    last.start()
    raise KeyboardInterrupt


WAIT_S = 3.0


def leave(code: int) -> NoReturn:
    """Exit with this code, after WAIT_S also if threads are left that Python would wait for. A signal ends it at once.

    The interpreter isn't taken down: where a daemon thread is in a library's C++ code, that aborts the process.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os._exit(code))
    threading.Thread(target=_leave_anyway, args=(code,), name="process-end", daemon=True).start()
    threading._shutdown()  # type: ignore[attr-defined]  # what Python itself does here: waits for threads
    atexit._run_exitfuncs()
    _end_now(code)


def _leave_anyway(code: int) -> None:
    time.sleep(WAIT_S)
    left = [
        thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
    ]
    if left:
        print(f"grmpipe: note: left without waiting for threads that never ended: {', '.join(left)}", file=sys.stderr)
        _end_now(code)


def _end_now(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            stream.flush()
    os._exit(code)
