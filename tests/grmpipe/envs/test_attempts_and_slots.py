"""Episodes that are played again, and the slots that groups book for theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.envs.attempts import EpisodeFailed, with_attempts
from grmpipe.envs.env import EnvFault
from grmpipe.envs.episode_slots import Booking, EpisodeSlots, in_own_slot
from grmpipe.envs.play import RolloutRequest
from grmpipe.types import Prompt, Rollout
from models.types import ignore_first_token

PROMPT = Prompt(prompt_id="p", messages=())
REQUEST = RolloutRequest(group_id="g", sibling=2, seed=7)


def tried(num_faults: int, attempts: int) -> tuple[list[RolloutRequest], Rollout | EpisodeFailed]:
    """The requests of all attempts at an episode whose first environments fail, and the result."""
    requests: list[RolloutRequest] = []

    async def play(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        requests.append(request)
        if len(requests) <= num_faults:
            raise EnvFault(f"fault {len(requests)}", "died")
        return Rollout(group_id="g", sibling=2, turns=(), status="finished")

    try:
        played = with_attempts(play, attempts=attempts, retry_s=0.0)(REQUEST, PROMPT, ignore_first_token)
        return requests, asyncio.run(played)
    except EpisodeFailed as failed:
        return requests, failed


def test_an_episode_without_a_fault_is_the_request_as_it_was() -> None:
    requests, result = tried(num_faults=0, attempts=3)
    assert requests == [REQUEST]
    assert isinstance(result, Rollout) and result.env_failures == ()


def test_each_attempt_has_its_own_seed_and_names_and_the_faults_are_kept() -> None:
    requests, result = tried(num_faults=2, attempts=3)
    assert [request.attempt for request in requests] == [0, 1, 2]
    assert [request.trajectory_id for request in requests] == ["g/2", "g/2/a1", "g/2/a2"]
    assert len({request.seed for request in requests}) == 3
    assert isinstance(result, Rollout)
    assert [(f.stage, f.cause, f.detail) for f in result.env_failures] == [
        ("env", "died", "fault 1"), ("env", "died", "fault 2"),
    ]  # fmt: skip


def test_after_the_last_attempt_there_is_no_rollout_but_all_causes() -> None:
    requests, result = tried(num_faults=9, attempts=3)
    assert len(requests) == 3
    assert isinstance(result, EpisodeFailed)
    assert [failure.detail for failure in result.failures] == ["fault 1", "fault 2", "fault 3"]
    assert result.failed.cause == "died"


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.booleans()), max_size=12), st.integers(4, 6))
def test_slots_are_never_overbooked_and_all_come_back(groups: list[tuple[int, int, bool]], capacity: int) -> None:
    """groups: (size, episodes that are really played, cancelled while it waits or plays)."""

    async def go() -> None:
        slots = EpisodeSlots(capacity)
        most = 0

        async def episode(booking: Booking) -> None:
            nonlocal most
            async with booking.taken():
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


def test_boots_are_paced() -> None:
    async def go() -> float:
        slots, clock = EpisodeSlots(None, boots_per_minute=6000), asyncio.get_running_loop()
        begun_s = clock.time()

        async def play(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
            return Rollout(group_id="g", sibling=0, turns=(), status="finished")

        await asyncio.gather(*(in_own_slot(play, slots)(REQUEST, PROMPT, ignore_first_token) for _ in range(4)))
        return clock.time() - begun_s

    assert asyncio.run(go()) >= 0.03


def test_more_episodes_than_slots_of_a_booking_are_an_error_of_ours() -> None:
    async def go() -> None:
        booking = await EpisodeSlots(1).book(1)
        async with booking.taken(), booking.taken():
            pass

    with pytest.raises(AssertionError, match="more episodes than slots"):
        asyncio.run(go())
