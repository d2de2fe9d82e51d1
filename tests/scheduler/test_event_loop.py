"""What a user's code leaves behind in an event loop doesn't keep its process, and limits hold for code that ignores
them.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grmpipe.scheduler import event_loop
from grmpipe.scheduler.event_loop import TimeIsUp, run_to_end, within

ROOT = Path(__file__).parents[2]
LEFT_BEHIND = """
import asyncio, threading, time
from grmpipe.scheduler import event_loop
event_loop.END_S = 0.2

async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except BaseException:
            pass

async def main():
    asyncio.create_task(asyncio.to_thread(time.sleep, 60))
    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0.1)
    print("the last line")
    return task  # kept until the end

event_loop.run_to_end(main())
"""


def test_threads_and_stubborn_tasks_do_not_keep_the_process() -> None:
    begun_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", LEFT_BEHIND], cwd=ROOT, timeout=50, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "the last line\n")
    assert "a task ignored its cancellation for 0.2 s, and is left behind: stubborn" in ended.stderr
    assert time.monotonic() - begun_s < 40


def test_name_look_ups_continue_while_other_calls_hang() -> None:
    free = threading.Event()

    async def main() -> None:
        stuck = [asyncio.create_task(asyncio.to_thread(free.wait)) for _ in range(40)]
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            assert await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 80)
        free.set()
        await asyncio.gather(*stuck)

    run_to_end(main())


async def ignores_its_end(free: asyncio.Event) -> None:
    while not free.is_set():
        try:
            await free.wait()
        except asyncio.CancelledError:
            continue


def test_a_limit_holds_for_what_ignores_its_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "CANCEL_S", 0.02)

    async def main() -> None:
        free = asyncio.Event()
        with pytest.raises(TimeIsUp):
            await within(0.02, ignores_its_end(free), "it")
        outer = asyncio.create_task(within(60, ignores_its_end(free), "it"))
        await asyncio.sleep(0.01)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        free.set()

    asyncio.run(main())


async def exits() -> None:
    raise SystemExit(3)


async def cancels_itself() -> None:
    raise asyncio.CancelledError


async def times_out() -> str:
    raise TimeoutError("its own")


def test_an_exception_within_a_limit_is_raised_and_ends_no_loop() -> None:
    async def main() -> None:
        with pytest.raises(SystemExit):
            await within(5, exits(), "it")
        with pytest.raises(RuntimeError, match="cancelled its own task"):
            await within(5, cancels_itself(), "it")
        with pytest.raises(TimeoutError, match="its own"):
            await within(5, times_out(), "it")
        assert await within(5, asyncio.sleep(0, "result"), "it") == "result"

    asyncio.run(main())
