"""The driver does one thing after another, and shares its cores with other busy processes."""

from __future__ import annotations

import asyncio

import pytest

from grmpipe.capacity.simulate.simulated_learner import SimulatedDriver
from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.models.engines.simulated.simulated_rate import SharedDevice


class Neighbour:
    """A process that is always busy."""

    def share_changed(self, share: float) -> None:
        self.share = share


def test_requests_pass_one_after_another() -> None:
    async def main() -> list[float]:
        driver, clock = SimulatedDriver(0.2), asyncio.get_running_loop().time

        async def one() -> float:
            await driver.attend()
            return clock()

        ends = await asyncio.gather(*(one() for _ in range(3)))
        await asyncio.sleep(1.0)
        ends.append(await one())
        assert driver.busy_s == pytest.approx(0.4)
        return ends

    assert run_virtually(main) == pytest.approx([0.1, 0.2, 0.3, 1.4])


def test_a_crowded_machine_slows_it_and_its_work_slows_the_others() -> None:
    async def main() -> None:
        device, neighbours = SharedDevice(capacity=2), [Neighbour() for _ in range(3)]
        for neighbour in neighbours:
            device.occupy(neighbour)
        assert {neighbour.share for neighbour in neighbours} == {2 / 3}
        driver = SimulatedDriver(0.2, device)
        attended = asyncio.create_task(driver.attend())
        await asyncio.sleep(0.01)
        assert {neighbour.share for neighbour in neighbours} == {0.5}
        await attended
        assert asyncio.get_running_loop().time() == pytest.approx(0.2), "half of a core"
        assert {neighbour.share for neighbour in neighbours} == {2 / 3}
        device.vacate(neighbours[0])
        await driver.attend()
        assert asyncio.get_running_loop().time() == pytest.approx(0.2 + 0.15), "two thirds"

    run_virtually(main)


def test_cancelled_request_delays_no_other() -> None:
    async def main() -> None:
        driver = SimulatedDriver(0.2)
        first, second = (asyncio.create_task(driver.attend()) for _ in range(2))
        await asyncio.sleep(0.05)
        first.cancel()
        await second
        assert asyncio.get_running_loop().time() == pytest.approx(0.05 + 0.1)

    run_virtually(main)


def test_a_driver_that_costs_nothing_waits_for_nothing() -> None:
    async def main() -> None:
        await SimulatedDriver(0.0).attend()
        assert asyncio.get_running_loop().time() == 0.0

    run_virtually(main)
