"""Active time stands still in pauses."""

from __future__ import annotations

import asyncio

import pytest

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.scheduler.clock import ActiveClock, Standstill


def test_a_deadline_moves_by_the_length_of_the_pauses_overlapping_ones_counted_once() -> None:
    async def go() -> float:
        clock, loop = ActiveClock(), asyncio.get_running_loop()

        async def pause(after_s: float, for_s: float) -> None:
            await asyncio.sleep(after_s)
            with clock.pause():
                await asyncio.sleep(for_s)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pause(1, 4))
            tasks.create_task(pause(2, 5))  # together: from 1 to 7
            start = loop.time()
            await clock.sleep_until(clock.now() + 3)
            return loop.time() - start

    assert run_virtually(go) == pytest.approx(9, abs=1e-3)


def test_now_does_not_change_during_a_pause() -> None:
    async def go() -> None:
        clock = ActiveClock()
        with clock.pause():
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
def test_time_limit_excludes_pauses_before_it_and_within_it(work_s: float, in_time: bool) -> None:
    """3 active seconds: 2 of the pauses were on at the beginning, then 1 active, 3 paused, and 2 active."""

    async def go() -> bool:
        clock = ActiveClock()

        async def pause(after_s: float, for_s: float) -> None:
            await asyncio.sleep(after_s)
            with clock.pause():
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
                    with clock.pause():
                        await asyncio.sleep(1)

    run_virtually(go)
