"""Limits find what an engine can hold, thrashing halves them, and engines that don't report pressure have none."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence

import pytest

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from models.types import (
    Completion,
    Engine,
    EngineDied,
    Pressure,
    RequestContext,
    SamplingParams,
    VersionSpan,
    ignore_first_token,
)
from scheduler.routing.concurrency import PROBE_ROUNDS, Aimd, Concurrency
from scheduler.routing.router import Router

FITTING_ROWS = 32
STEP_S, ROW_S = 0.02, 0.001  # of a decoding step
MEAN_STEPS = 100  # of one request


class Thrasher:
    """Decodes all its requests in steps. Rows above `FITTING_ROWS` preempt others, which repeat their work."""

    def __init__(self, tells: bool = True) -> None:
        self.rows: dict[str, float] = {}  # -> remaining steps
        self.num_preempted = 0
        self.tells = tells
        self.most_rows = 0
        self._stepping: asyncio.Task[None] | None = None
        self._done: dict[str, asyncio.Event] = {}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        self.rows[context.request_id] = MEAN_STEPS * (0.5 + random.Random(context.request_id).random())
        self.most_rows = max(self.most_rows, len(self.rows))
        done = self._done[context.request_id] = asyncio.Event()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        await done.wait()
        spans = (VersionSpan(model="m", version=0, start=0, end=1),)
        return Completion(token_ids=(1,), logprobs=(0.0,), text="", finish_reason="stop", versions=spans)

    async def pressure(self) -> Pressure | None:
        if not self.tells:
            return None
        running = min(len(self.rows), FITTING_ROWS)
        return Pressure(
            num_running=running,
            num_waiting=len(self.rows) - running,
            kv_share=min(1.0, len(self.rows) / (1.1 * FITTING_ROWS)),
            num_preempted=self.num_preempted,
        )

    async def abort(self, request_id: str) -> None:
        """Does nothing: the engine is alive."""

    async def _step(self) -> None:
        while self.rows:
            rows = len(self.rows)
            await asyncio.sleep(STEP_S + rows * ROW_S)
            too_many = max(0, rows - FITTING_ROWS)
            self.num_preempted += too_many
            for request_id in list(self.rows):
                self.rows[request_id] -= max(0.3, 1 - 2 * too_many / rows)
                if self.rows[request_id] <= 0:
                    del self.rows[request_id]
                    self._done.pop(request_id).set()


def seconds_for(num_requests: int, width: int, tells: bool) -> tuple[float, int]:
    """That many requests through a router, at most `width` offered at once; and the largest number of rows."""

    async def go() -> tuple[float, int]:
        engine = Thrasher(tells)
        router, places = Router("grm", {"grm-0": engine}), asyncio.Semaphore(width)  # type: ignore[dict-item]
        params = SamplingParams(max_new_tokens=4)

        async def one(number: int) -> None:
            async with places:
                context = RequestContext(request_id=f"r{number}", group_id=f"g{number}", role="grm")
                await router.generate((1,), params, context)

        await asyncio.gather(*(one(number) for number in range(num_requests)))
        return asyncio.get_running_loop().time(), engine.most_rows

    return run_virtually(go)


def test_an_engine_that_thrashes_is_held_near_the_best_fixed_limit() -> None:
    fixed = {width: seconds_for(2000, width, tells=False)[0] for width in (24, 32, 36, 64)}
    best = min(fixed.values())
    assert fixed[32] == best
    limited, _ = seconds_for(2000, 64, tells=True)
    assert limited <= 1.10 * best
    assert fixed[64] > 2 * best  # without the limit


def test_an_engine_that_cannot_tell_is_given_all_there_is() -> None:
    _, most_rows = seconds_for(300, 300, tells=False)
    assert most_rows == 300


def told(num_running: int, num_preempted: int = 0, kv_share: float = 0.5) -> Pressure:
    return Pressure(num_running=num_running, num_waiting=1, kv_share=kv_share, num_preempted=num_preempted)


def thrashed_at(num_running: int) -> Aimd:
    """A limit that has fallen, and whose fall has taken effect."""
    limit = Aimd()
    limit.update(told(num_running, num_preempted=1), in_flight=num_running, held_back=False)
    limit.update(told(1, num_preempted=1), in_flight=0, held_back=False)
    return limit


def test_a_limit_is_infinite_until_the_first_preemption_and_is_halved_from_what_ran_then() -> None:
    limit = Aimd()
    limit.update(told(100), in_flight=500, held_back=False)
    assert limit.limit == math.inf
    limit.update(told(60, num_preempted=3), in_flight=500, held_back=False)
    assert limit.limit == 30


def test_a_fall_takes_effect_before_the_next_one() -> None:
    limit = Aimd()
    limit.update(told(60, num_preempted=3), in_flight=500, held_back=False)
    limit.update(told(60, num_preempted=9), in_flight=200, held_back=True)  # sent before it fell
    limit.update(told(30, num_preempted=12), in_flight=30, held_back=True)  # and preempted before they had left
    assert limit.limit == 30
    limit.update(told(30, num_preempted=13), in_flight=30, held_back=True)
    assert limit.limit == 15


def test_a_limit_rises_fast_to_near_where_it_thrashed_and_then_by_one() -> None:
    limit, seen = thrashed_at(100), []
    for _ in range(6):
        limit.update(told(50, num_preempted=1), in_flight=50, held_back=True)
        seen.append(limit.limit)
    assert seen == [70, 80, 85, 87.5, 88.75, 89.375]  # one check each; then only after rounds of requests
    for _ in range(PROBE_ROUNDS * 90):
        limit.ended(50)
    limit.update(told(50, num_preempted=1), in_flight=50, held_back=True)
    assert limit.limit == 90.375


def test_a_limit_beyond_where_it_thrashed_once_rises_fast_again() -> None:
    limit = thrashed_at(4)
    for _ in range(200):
        for _ in range(100):
            limit.ended(1)
        limit.update(told(1, num_preempted=1), in_flight=1, held_back=True)
    assert limit.limit > 300


@pytest.mark.parametrize(("held_back", "kv_share"), [(False, 0.5), (True, 0.96)])
def test_a_limit_that_nobody_meets_or_a_full_cache_stays_where_it_is(held_back: bool, kv_share: float) -> None:
    limit = thrashed_at(10)
    limit.update(told(5, num_preempted=1, kv_share=kv_share), in_flight=5, held_back=held_back)
    assert limit.limit == 5


def test_who_waits_goes_by_priority_and_who_gives_up_holds_nobody_up() -> None:
    async def go() -> list[int]:
        concurrency, done = Concurrency(), []

        async def one(priority: int) -> None:
            await concurrency.wait_for_room(priority)
            done.append(priority)

        tasks = [asyncio.create_task(one(priority)) for priority in (3, 1, 2, 0)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.sleep(0)
        for _ in range(3):
            concurrency.left("a", object(), 0)
            await asyncio.sleep(0)
        return done

    assert asyncio.run(go()) == [1, 2, 3]


def test_an_engine_that_died_leaves_its_limit_and_those_who_waited_for_it_go_elsewhere() -> None:
    async def go() -> tuple[float, float]:
        engine = Thrasher()
        router = Router("grm", {"grm-0": engine})  # type: ignore[dict-item]
        router.on_death = lambda name, death: True
        params = SamplingParams(max_new_tokens=4)

        def ask(number: int) -> asyncio.Task[Completion]:
            context = RequestContext(request_id=f"r{number}", group_id=f"g{number}", role="grm")
            return asyncio.create_task(router.generate((1,), params, context))

        first = [ask(number) for number in range(200)]
        await asyncio.gather(*first)
        late = [ask(number) for number in range(200, 400)]
        await asyncio.sleep(1)
        limit = router._concurrency.limit("grm-0")
        router.mark_dead("grm-0", engine, EngineDied("killed"))  # type: ignore[arg-type]
        replacement: Engine = Thrasher()  # type: ignore[assignment]
        router.admit("grm-0", replacement)
        after = router._concurrency.limit("grm-0")
        await asyncio.gather(*late)
        return limit, after

    limit, after = run_virtually(go)
    assert limit <= 2 * FITTING_ROWS
    assert after == math.inf
