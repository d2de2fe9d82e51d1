"""Calls that block run beside each other, and one that never ends holds up neither another nor the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grmpipe.scheduler import daemon_threads
from grmpipe.scheduler.daemon_threads import DaemonThreads, TooManyStuck, in_own_thread

ROOT = Path(__file__).parents[2]


def test_calls_that_are_stuck_are_bounded_by_function_and_free_when_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_threads, "MAX_STUCK", 3)
    free = threading.Event()

    def hangs() -> str:
        free.wait()
        return "free"

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await in_own_thread(hangs)

    async def go() -> None:
        for _ in range(3):
            await give_up()
        with pytest.raises(TooManyStuck, match=r"^3 earlier calls of .*hangs \(.*test_daemon_threads\.py:\d+\) never"):
            await in_own_thread(hangs)
        assert await in_own_thread(lambda: "another function") == "another function"
        free.set()
        end_s = time.monotonic() + 10
        while any("hangs" in thread.name for thread in threading.enumerate()):
            assert time.monotonic() < end_s
            await asyncio.sleep(0.01)
        assert await in_own_thread(hangs) == "free"

    asyncio.run(go())


@pytest.mark.parametrize("ending", [SystemExit(3), KeyboardInterrupt(), StopIteration()])
def test_an_exit_in_a_daemon_thread_is_an_error_of_the_call(ending: BaseException) -> None:
    def exits() -> None:
        raise ending

    with pytest.raises(RuntimeError, match=rf"exits \(.*\) raised {type(ending).__name__}"):
        asyncio.run(in_own_thread(exits))


def test_an_executor_starts_a_thread_whenever_all_are_busy_and_its_end_waits_for_none() -> None:
    free = threading.Event()
    threads = DaemonThreads()
    stuck = [threads.submit(free.wait) for _ in range(40)]
    assert threads.submit(lambda: threading.current_thread().daemon).result(timeout=5)
    threads.shutdown(wait=True)
    assert not any(each.done() for each in stuck)
    free.set()
    assert all(each.result(timeout=5) for each in stuck)


def test_an_executor_has_an_upper_bound_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_threads, "MAX_THREADS", 2)
    threads, free = DaemonThreads(), threading.Event()
    stuck = [threads.submit(free.wait) for _ in range(2)]
    queued = threads.submit(lambda: "later")
    assert not queued.done()
    free.set()
    assert queued.result(timeout=5) == "later" and all(each.result(timeout=5) for each in stuck)


HANGS = """
import asyncio, threading
from grmpipe.scheduler.daemon_threads import in_own_thread

async def main():
    try:
        await asyncio.wait_for(in_own_thread(threading.Event().wait), 0.1)
    except TimeoutError:
        print("given up")

asyncio.run(main())
"""


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, "given up")
