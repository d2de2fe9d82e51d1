"""The end of the process, for which threads that a user's code started, and that never end, are not waited for."""

import os
import sys
import threading
import time
from typing import NoReturn

WAIT_S = 3.0


def leave(code: int) -> NoReturn:
    """Exit with this code: as usual, or after WAIT_S if threads are left that Python would wait for."""
    threading.Thread(target=_leave_anyway, args=(code,), name="process-end", daemon=True).start()
    sys.exit(code)


def _leave_anyway(code: int) -> None:
    time.sleep(WAIT_S)
    left = [
        thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
    ]
    if left:
        print(f"grmpipe: note: left without waiting for threads that never ended: {', '.join(left)}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
