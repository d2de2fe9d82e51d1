"""The end of the process, for which threads that a user's code started, and that never end, are not waited for."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from typing import NoReturn

from grmpipe.run.signals import SIGNALS

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
