"""Stages keep their concurrency, cancel by key and fail like their work."""

from __future__ import annotations

import asyncio

import pytest

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.scheduler.work_queue import Stage


def test_a_stage_never_exceeds_its_width_and_knows_how_long_it_was_busy() -> None:
    async def go() -> None:
        running: list[int] = []
        most = 0

        async def work(item: int) -> None:
            nonlocal most
            running.append(item)
            most = max(most, len(running))
            await asyncio.sleep(1)
            running.remove(item)

        stage: Stage[int] = Stage("s", work, str, width=3, bound=0)
        runner = asyncio.create_task(stage.run())
        for item in range(7):
            await stage.put(item)
        await asyncio.sleep(10)
        assert most == 3
        assert stage.meter.busy_s == pytest.approx(3, abs=1e-3)
        runner.cancel()

    run_virtually(go)


def test_a_full_inbox_holds_its_producer_back() -> None:
    async def go() -> None:
        stage: Stage[int] = Stage("s", lambda item: asyncio.sleep(1), str, width=1, bound=2)
        for item in range(2):
            await stage.put(item)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await stage.put(2)

    run_virtually(go)


def test_cancel_ends_the_work_of_one_key_even_before_it_began_and_frees_its_place() -> None:
    async def go() -> None:
        done: list[str] = []

        async def work(item: str) -> None:
            await asyncio.sleep(1)
            done.append(item)

        stage: Stage[str] = Stage("s", work, lambda item: item[0], width=2, bound=0)
        runner = asyncio.create_task(stage.run())
        for item in ("a1", "a2", "b1", "b2"):
            await stage.put(item)
        await asyncio.sleep(0)  # both places have a's tasks, which have not run yet
        stage.cancel("a")
        await asyncio.sleep(5)
        assert done == ["b1", "b2"]
        runner.cancel()

    run_virtually(go)


def test_a_crash_of_the_work_ends_the_stage_as_itself() -> None:
    async def go() -> None:
        async def work(item: int) -> None:
            raise ValueError("the first cause")

        stage: Stage[int] = Stage("s", work, str, width=2, bound=0)
        await stage.put(1)
        await stage.put(2)
        with pytest.raises(ValueError, match="the first cause"):
            await stage.run()

    run_virtually(go)
