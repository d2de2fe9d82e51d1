"""A thread that notices an event loop which stands still, and says which function of the user's blocks it."""

import asyncio
import linecache
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from grmpipe.envs.limited_env import LANE
from grmpipe.models.import_path import is_library, list_our_folders

log = logging.getLogger(__name__)

CHECK_S = 1.0  # between two beats
BLOCKED_S = 10.0  # without a beat; doubled for each further note
ROOT = Path(__file__).parents[2]
OURS = (*list_our_folders(), str(ROOT / "launch.py"))
WORKFLOWS = str(ROOT / "grmpipe/workflows") + "/"


@contextmanager
def watch_loop() -> Iterator[None]:
    """Context: while the running event loop stands still for BLOCKED_S or longer, a warning names the cause."""
    watchdog = _Watchdog(asyncio.get_running_loop(), threading.get_ident())
    thread = threading.Thread(target=watchdog.run, name="loop-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watchdog.end()
        thread.join(CHECK_S)


class _Watchdog:
    """Asks the loop for a sign of life again and again. thread_id: the thread that the loop runs in."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        self._loop = loop
        self._thread_id = thread_id
        self._ended = threading.Event()
        self._beat = threading.Event()

    def end(self) -> None:
        """End the thread at once, also if it waits for a sign of life: a loop that has ended gives none."""
        self._ended.set()
        self._beat.set()

    def run(self) -> None:
        while not self._ended.wait(CHECK_S):
            beat = self._beat = threading.Event()
            if self._ended.is_set():
                return
            try:
                self._loop.call_soon_threadsafe(beat.set)
            except RuntimeError:  # the loop is closed
                return
            self._await(beat)

    def _await(self, beat: threading.Event) -> None:
        begun_s, limit_s, level = time.monotonic(), BLOCKED_S, 0
        while not beat.wait(limit_s):
            if self._ended.is_set() or beat.wait(CHECK_S / 2):  # a process that was stopped goes on
                return
            level, text = self._found(time.monotonic() - begun_s)
            log.log(level, "%s", text)
            limit_s *= 2
        if level and not self._ended.is_set():
            log.log(level, "the event loop goes on, after %.0f s", time.monotonic() - begun_s)

    def _found(self, blocked_s: float) -> tuple[int, str]:
        """The level and text of a note. The console shows warnings only: those of the user's own code."""
        task = asyncio.current_task(self._loop)
        name = task.get_name() if task is not None else "a callback"
        stack = list(walk_stack(sys._current_frames().get(self._thread_id)))
        stands_still = f"the event loop has stood still for {blocked_s:.0f} s"
        # The innermost one decides: what a user's function awaits or calls of ours may block as well.
        cause = next((frame for frame in stack if is_ours(file := frame.f_code.co_filename) or is_users(file)), None)
        if cause is None or is_ours(cause.f_code.co_filename):
            inner = format_line(stack[0]) if stack else "no function"
            caller = "" if cause in (None, stack[0]) else f", which grmpipe's {format_line(cause)} called"
            return logging.INFO, f"{stands_still}: {name}, in {inner}{caller}. It goes on when that has ended"
        return logging.WARNING, (
            f"{stands_still}: {name}, in {format_line(cause)}, blocks it. Meanwhile nothing else runs in this "
            f"process, and "
            "no time limit holds. Await something asynchronous there (asyncio.to_thread, an asynchronous client)"
            f"{way_out(name, stack)}. Ctrl-C twice leaves"
        )


def walk_stack(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of what the event loop runs, from the innermost one."""
    while frame is not None and frame.f_code.co_name != "run_forever":
        yield frame
        frame = frame.f_back


def is_ours(file: str) -> bool:
    return file.startswith(OURS)


def is_users(file: str) -> bool:
    return not is_ours(file) and not file.startswith("<") and not is_library(file)


def way_out(task: str, stack: Sequence[FrameType]) -> str:
    """What keeps such code from the run's event loop."""
    if task.startswith(f"{LANE}."):
        return ", or type env.isolation.kind=process, which ends what takes longer than its limit"
    if any(frame.f_code.co_filename.startswith(WORKFLOWS) for frame in stack):
        return ", or type env.runs_in=process, where a workflow may block"
    return ""


def format_line(frame: FrameType) -> str:
    """The function, file, line and text of the line that a frame is at."""
    code, line = frame.f_code, frame.f_lineno
    return f"{code.co_qualname} ({code.co_filename}:{line}: {linecache.getline(code.co_filename, line).strip()})"
