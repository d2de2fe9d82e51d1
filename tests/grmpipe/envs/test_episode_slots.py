"""The slots that groups book for their episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.envs.episode_slots import Booking, EpisodeSlots, in_own_slot
from grmpipe.envs.play import RolloutRequest
from grmpipe.models.types import ignore_first_token
from grmpipe.types import Prompt, Rollout

PROMPT = Prompt(prompt_id="p", messages=())


REQUEST = RolloutRequest(group_id="g", sibling=2, seed=7)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.booleans()), max_size=12), st.integers(4, 6))
def test_slots_are_never_overbooked_and_all_come_back(groups: list[tuple[int, int, bool]], capacity: int) -> None:
    """groups: (size, episodes that are really played, cancelled while it waits or plays)."""

    async def go() -> None:
        slots = EpisodeSlots(capacity)
        most = 0

        async def episode(booking: Booking) -> None:
            nonlocal most
            async with booking:
                most = max(most, slots.num_open)
                await asyncio.sleep(0)

        async def group(size: int, played: int) -> None:
            booking = await slots.book(size)
            try:
                async with asyncio.TaskGroup() as episodes:
                    for _ in range(min(size, played)):
                        episodes.create_task(episode(booking))
            finally:
                booking.end()

        tasks = [asyncio.create_task(group(size, played)) for size, played, _ in groups]
        await asyncio.sleep(0)
        for task, (_, _, cancelled) in zip(tasks, groups, strict=True):
            if cancelled:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= capacity
        whole = await asyncio.wait_for(slots.book(capacity), 1)
        whole.end()
        assert (slots.num_open, slots.num_waiting) == (0, 0)

    asyncio.run(go())


def test_a_large_booking_is_not_overtaken_by_small_ones_that_would_fit() -> None:
    async def go() -> list[str]:
        slots, order = EpisodeSlots(4), list[str]()
        first = await slots.book(2)

        async def book(name: str, count: int) -> None:
            booking = await slots.book(count)
            order.append(name)
            booking.end()

        waiting = [asyncio.create_task(book("whole group", 4)), asyncio.create_task(book("one", 1))]
        await asyncio.sleep(0)
        assert slots.num_waiting == 2
        first.end()
        await asyncio.gather(*waiting)
        return order

    assert asyncio.run(go()) == ["whole group", "one"]


def test_an_episode_of_no_group_has_a_slot_of_its_own() -> None:
    async def go() -> int:
        slots, most = EpisodeSlots(2), 0

        async def play(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
            nonlocal most
            most = max(most, slots.num_open)
            await asyncio.sleep(0)
            return Rollout(group_id="g", sibling=0, turns=(), status="finished")

        await asyncio.gather(*(in_own_slot(play, slots)(REQUEST, PROMPT, ignore_first_token) for _ in range(4)))
        return most

    assert asyncio.run(go()) == 2


def test_booking_rejects_more_episodes_than_it_has_slots() -> None:
    async def go() -> None:
        booking = await EpisodeSlots(1).book(1)
        async with booking, booking:
            pass

    with pytest.raises(AssertionError, match="more episodes than slots"):
        asyncio.run(go())
