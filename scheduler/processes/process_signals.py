"""Signals that are sent to all processes of a run at once: to their group, to their control group. Only the driver acts
on them; it ends the others in order, and they end when it does.
"""

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SENT_TO_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def block_signals() -> Iterator[None]:
    """Context in which processes start that block these signals, and so do theirs, until `leave_to_driver` in one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SENT_TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_driver() -> None:
    """Ignore these signals in this process, but not in those that it starts: an ignored or blocked signal would stay so
    in a user's program, a handled one doesn't. Called in the thread that starts others.
    """
    libc = ctypes.CDLL(None)
    for number in SENT_TO_ALL:  # signal.signal works in the main thread only, which is Ray's
        libc.signal(number, libc.abs)  # any function that takes a number and does nothing
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT_TO_ALL)


def rearm_handlers() -> None:
    """Put Python's handlers back below which a library has set the system's."""
    if threading.current_thread() is threading.main_thread():
        for number in SENT_TO_ALL:
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, each with its group if it leads one."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(parent) == process.pid:
                children.append(int(stat.parent.name))
    process.kill()
    for child in children:
        for kill in (os.killpg, os.kill):
            with suppress(OSError):
                kill(child, signal.SIGKILL)
