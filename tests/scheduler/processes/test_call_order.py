"""Numbered calls of a host, in any order of arrival."""

from __future__ import annotations

import asyncio

import pytest

from grmpipe.scheduler.processes.call_order import OrderedHost


class Noting(OrderedHost):
    """Records when its calls begin and end; they end when the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.let_go = asyncio.Event()

    async def work(self, what: str) -> str:
        self.notes.append(f"{what} begins")
        await self.let_go.wait()
        self.notes.append(f"{what} ends")
        return what

    async def fail(self) -> None:
        raise ValueError("no")


def test_calls_begin_by_their_numbers_and_overlap() -> None:
    async def main() -> None:
        host = Noting()
        arrived = [asyncio.create_task(host.call_in_order(number, "work", f"call {number}")) for number in (2, 1, 3, 0)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert host.notes == [f"call {number} begins" for number in range(4)]
        host.let_go.set()
        assert await asyncio.gather(*arrived) == ["call 2", "call 1", "call 3", "call 0"]

    asyncio.run(main())


def test_a_call_that_fails_lets_the_next_begin() -> None:
    async def main() -> None:
        host = Noting()
        host.let_go.set()
        late = asyncio.create_task(host.call_in_order(1, "work", "call 1"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="no"):
            await host.call_in_order(0, "fail")
        assert await late == "call 1"

    asyncio.run(main())
