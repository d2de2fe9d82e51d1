"""Active time stands still in pauses; stages keep their concurrency, cancel by key and fail like their work."""

from __future__ import annotations

import asyncio

import pytest

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from scheduler.clock import ActiveClock, Standstill
from scheduler.stage import Stage


def test_a_deadline_moves_by_the_length_of_the_pauses_overlapping_ones_counted_once() -> None:
    async def go() -> float:
        clock, loop = ActiveClock(), asyncio.get_running_loop()

        async def pause(after_s: float, for_s: float) -> None:
            await asyncio.sleep(after_s)
            with clock.paused():
                await asyncio.sleep(for_s)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pause(1, 4))
            tasks.create_task(pause(2, 5))  # together: from 1 to 7
            start = loop.time()
            await clock.sleep_until(clock.now() + 3)
            return loop.time() - start

    assert run_virtually(go) == pytest.approx(9, abs=1e-3)


def test_now_stands_still_in_a_pause() -> None:
    async def go() -> None:
        clock = ActiveClock()
        with clock.paused():
            before = clock.now()
            await asyncio.sleep(5)
            assert clock.now() == before

    run_virtually(go)


def test_clocks_of_a_standstill_stop_together_and_one_that_joins_late_stops_too() -> None:
    async def go() -> list[float]:
        standstill, clocks = Standstill(), [ActiveClock(), ActiveClock()]
        starts = [clock.now() for clock in clocks]
        standstill.add(clocks[0])
        for stopped, clock in ((True, None), (True, clocks[1]), (False, None), (False, None)):
            standstill.set(stopped)
            if clock is not None:
                standstill.add(clock)
            await asyncio.sleep(1)
        return [clock.now() - start for clock, start in zip(clocks, starts, strict=True)]

    assert run_virtually(go) == pytest.approx([2, 3], abs=1e-3)


@pytest.mark.parametrize(("work_s", "in_time"), [(7.9, True), (8.1, False)])
def test_a_time_limit_stands_still_in_pauses_before_it_and_within_it(work_s: float, in_time: bool) -> None:
    """3 active seconds: 2 of the pauses were on at the beginning, then 1 active, 3 paused, and 2 active."""

    async def go() -> bool:
        clock = ActiveClock()

        async def pause(after_s: float, for_s: float) -> None:
            await asyncio.sleep(after_s)
            with clock.paused():
                await asyncio.sleep(for_s)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pause(0, 2))
            tasks.create_task(pause(3, 3))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            try:
                async with clock.timeout(3):
                    await asyncio.sleep(work_s)
            except TimeoutError:
                return False
            return True

    assert run_virtually(go) is in_time


def test_a_limit_that_has_struck_is_left_alone_by_later_pauses() -> None:
    async def go() -> None:
        clock = ActiveClock()
        with pytest.raises(TimeoutError):
            async with clock.timeout(1):
                try:
                    await asyncio.sleep(5)
                finally:
                    with clock.paused():
                        await asyncio.sleep(1)

    run_virtually(go)


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
