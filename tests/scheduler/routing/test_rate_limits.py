"""No minute exceeds its limit, urgent requests go first, and unused amounts are given back."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.scheduler.routing.rate_limits import BURST_S, Bucket, RateLimits

T = TypeVar("T")


@given(
    per_minute=st.integers(1, 6000),
    asks=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 500)), min_size=1, max_size=60),
)
def test_over_any_time_no_more_goes_out_than_the_rate_a_full_bucket_and_the_last_one(
    per_minute: int, asks: list[tuple[float, int]]
) -> None:
    now_s, bucket, sent = 0.0, Bucket(per_minute, 0.0), []
    for pause_s, amount in asks:
        now_s += pause_s
        now_s += bucket.wait_s(amount, now_s)
        bucket.take(amount, now_s)
        sent.append((now_s, amount))
    room = max(1.0, per_minute / 60 * BURST_S)
    for first in range(len(sent)):
        total = 0
        for at_s, amount in sent[first:]:
            assert total <= per_minute / 60 * (at_s - sent[first][0]) + room + 1e-3
            total += amount


def test_requests_leave_at_their_rate() -> None:
    async def go() -> list[float]:
        limits, left = RateLimits(requests_per_minute=120, tokens_per_minute=0), []

        async def one() -> None:
            await limits.admit(10**9, 0)
            left.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(one() for _ in range(122)))
        return left

    left = run_virtually(go)
    assert left[-1] - left[0] == pytest.approx(60, abs=0.1)


def test_lowest_priority_number_leaves_the_queue_first() -> None:
    async def go() -> list[int]:
        limits, left = RateLimits(requests_per_minute=60, tokens_per_minute=0), []

        async def one(priority: int) -> None:
            await limits.admit(1, priority)
            left.append(priority)

        await asyncio.gather(*(one(priority) for priority in (5, 3, 4, 1, 2)))
        return left

    assert run_virtually(go) == [5, 1, 2, 3, 4]


def test_tokens_that_were_expected_and_not_used_are_given_back() -> None:
    async def seconds(used: int) -> float:
        limits = RateLimits(requests_per_minute=0, tokens_per_minute=6000)
        for _ in range(11):
            await limits.admit(1000, 0)
            limits.settle(1000, used)
        return asyncio.get_running_loop().time()

    assert run_virtually(lambda: seconds(1000)) == pytest.approx(100, abs=1)  # 100 tokens per second
    assert run_virtually(lambda: seconds(200)) == pytest.approx(20, abs=2)


def test_cancelled_wait_takes_no_quota_and_delays_no_other() -> None:
    async def go() -> float:
        limits = RateLimits(requests_per_minute=60, tokens_per_minute=60)
        await limits.admit(1, 0)
        gone = [asyncio.create_task(limits.admit(50, 0)) for _ in range(5)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await limits.admit(1, 1)
        return asyncio.get_running_loop().time()

    assert run_virtually(go) == pytest.approx(1, abs=0.01)


def test_requests_without_limits_never_wait() -> None:
    async def go() -> float:
        limits = RateLimits(requests_per_minute=0, tokens_per_minute=0)
        for _ in range(1000):
            await limits.admit(10**6, 0)
            limits.settle(10**6, 0)
        return asyncio.get_running_loop().time()

    assert run_virtually(go) == 0.0
