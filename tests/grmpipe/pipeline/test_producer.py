"""More urgent groups go first, and none waits forever."""

from __future__ import annotations

import asyncio
import heapq

from hypothesis import given
from hypothesis import strategies as st

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.pipeline.producer import rank
from grmpipe.scheduler.work_queue import Stage


def test_most_urgent_item_goes_first_and_older_ones_break_ties() -> None:
    ranks = [rank(arrival=arrival, urgency=urgency, patience=8) for arrival, urgency in enumerate([4, 1, 4, 2, 1])]
    assert sorted(range(5), key=ranks.__getitem__) == [1, 4, 3, 0, 2]


@given(
    urgencies=st.lists(st.integers(0, 12), min_size=1, max_size=200),
    serves=st.lists(st.booleans(), min_size=200, max_size=200),
    patience=st.integers(0, 8),
)
def test_patience_bounds_how_often_an_item_is_overtaken(
    urgencies: list[int], serves: list[bool], patience: int
) -> None:
    waiting: list[tuple[int, int]] = []
    served: list[int] = []
    for arrival, urgency in enumerate(urgencies):
        heapq.heappush(waiting, (rank(arrival=arrival, urgency=urgency, patience=patience), arrival))
        if serves[arrival]:
            served.append(heapq.heappop(waiting)[1])
    served += [arrival for _, arrival in sorted(waiting)]
    for place, arrival in enumerate(served):
        overtakers = [other for other in served[:place] if other > arrival]
        assert all(other - arrival <= patience * (urgencies[arrival] - urgencies[other]) for other in overtakers)


def test_a_stage_takes_the_lowest_rank_first_and_alike_ones_in_order_of_arrival() -> None:
    done: list[tuple[int, str]] = []

    async def work(item: tuple[int, str]) -> None:
        await asyncio.sleep(1)
        done.append(item)

    async def go() -> None:
        stage: Stage[tuple[int, str]] = Stage("s", work, str, width=1, bound=0, rank=lambda item: item[0])
        for item in ((3, "a"), (1, "a"), (3, "b"), (0, "a"), (1, "b")):
            await stage.put(item)
        runner = asyncio.create_task(stage.run())
        await asyncio.sleep(6)
        runner.cancel()

    run_virtually(go)
    assert done == [(0, "a"), (1, "a"), (1, "b"), (3, "a"), (3, "b")]
