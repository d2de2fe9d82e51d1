"""Waiters are released by priority, then by arrival; a cancelled one blocks no other."""

from __future__ import annotations

import asyncio

from grmpipe.models.request_gates import PriorityGate


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_the_lowest_number_goes_first_then_the_oldest() -> None:
    async def main() -> None:
        gate, order = PriorityGate(), list[int]()

        async def caller(number: int, priority: int) -> None:
            await gate.wait(priority)
            order.append(number)

        callers = [asyncio.create_task(caller(number, priority)) for number, priority in enumerate((2, 1, 2, 0))]
        await settle()
        assert gate.let_one()
        await settle()
        assert order == [3]
        gate.let_all()
        await asyncio.gather(*callers)
        assert order == [3, 1, 0, 2]
        assert not gate.let_one(), "nobody waits any more"

    asyncio.run(main())


def test_one_that_is_cancelled_is_passed_over_and_its_turn_given_back() -> None:
    async def main() -> None:
        gate, given_back = PriorityGate(), list[str]()
        gone, lucky, late = (
            asyncio.create_task(gate.wait(priority, lambda name=name: given_back.append(name)))  # type: ignore[misc]
            for priority, name in enumerate(("gone", "lucky", "late"))
        )
        await settle()
        gone.cancel()
        await settle()
        assert gate.first_amount == 0 and gate.let_one()
        lucky.cancel()  # at the moment of its release
        await asyncio.gather(gone, lucky, return_exceptions=True)
        assert given_back == ["lucky"]
        assert not late.done() and gate.let_one()
        await late

    asyncio.run(main())


def test_gate_reports_the_amount_of_the_next_waiter() -> None:
    async def main() -> None:
        gate = PriorityGate()
        assert gate.first_amount is None
        first, second = gate.join(1, amount=7), gate.join(0, amount=5)
        assert gate.first_amount == 5
        second.cancel()
        assert gate.first_amount == 7
        gate.let_one()
        await gate.wait_for_turn(first)
        assert gate.first_amount is None

    asyncio.run(main())
