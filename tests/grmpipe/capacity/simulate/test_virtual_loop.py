"""The virtual clock: it jumps to the next timer, keeps asyncio's order, and reports when nothing can happen any
more.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from grmpipe.capacity.simulate.virtual_loop import NothingWillHappen, run_virtually


def test_a_year_passes_in_no_time() -> None:
    async def go() -> float:
        await asyncio.sleep(365 * 86400.0)
        return asyncio.get_running_loop().time()

    began = time.process_time()
    assert run_virtually(go) == pytest.approx(365 * 86400.0)
    assert time.process_time() - began < 2.0


def test_timers_fire_in_order_and_time_jumps_from_one_to_the_next() -> None:
    async def go() -> list[tuple[float, str]]:
        clock, seen = asyncio.get_running_loop().time, []

        async def after(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            seen.append((clock(), name))
            await asyncio.sleep(0)
            seen.append((clock(), name))

        await asyncio.gather(after(2.0, "b"), after(1.0, "a"), after(2.5, "c"))
        return seen

    assert run_virtually(go) == [(1.0, "a"), (1.0, "a"), (2.0, "b"), (2.0, "b"), (2.5, "c"), (2.5, "c")]


def test_a_timeout_counts_virtual_seconds() -> None:
    async def go() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtually(go) == pytest.approx(60.0)


def test_deadlocked_tasks_raise_an_error_instead_of_hanging() -> None:
    async def go() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingWillHappen, match="no timer"):
        run_virtually(go)


def test_late_in_a_long_run_a_short_sleep_still_ends() -> None:
    async def go() -> None:
        await asyncio.sleep(1e9)
        for _ in range(100):
            await asyncio.sleep(1e-9)

    run_virtually(go)


def test_a_hundred_thousand_sleeps_take_seconds() -> None:
    async def go() -> None:
        async def one(step_s: float) -> None:
            for _ in range(1000):
                await asyncio.sleep(step_s)

        await asyncio.gather(*(one(1.0 + index / 1000) for index in range(100)))

    began = time.process_time()
    run_virtually(go)
    assert time.process_time() - began < 10.0


def test_the_work_of_a_thread_takes_no_virtual_time_and_needs_no_timer() -> None:
    async def worked() -> tuple[int, float]:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(lambda: 42), asyncio.get_running_loop().time()

    assert run_virtually(worked) == (42, 0.0)
