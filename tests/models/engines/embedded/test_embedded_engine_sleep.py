"""The embedded engine frees its memory, and samples afterwards what it would have sampled."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine

import pytest


def in_a_loop(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        asyncio.run(test(**fixtures))

    return run


@in_a_loop
async def test_sleep_frees_the_cache_and_changes_no_later_sample(open_engine, ask, prompt_of) -> None:
    rested, awake = open_engine(), open_engine()
    prompt = prompt_of(9)
    await ask(rested, prompt, "first", max_new_tokens=20)
    held = rested._worker._slots.kv_NRT2GD.untyped_storage().nbytes()
    await rested.pause()
    freed = await rested.sleep()
    assert freed == held > 0
    assert rested._worker._slots.kv_NRT2GD.untyped_storage().nbytes() == 0
    await rested.wake()
    await rested.resume()
    assert await ask(rested, prompt, "next") == await ask(awake, prompt, "next")


@in_a_loop
async def test_requests_during_sleep_wait_for_the_wake_up(engine, ask, prompt_of) -> None:
    await engine.pause()
    await engine.sleep()
    answer = asyncio.ensure_future(ask(engine, prompt_of(5)))
    await asyncio.sleep(0.05)
    assert not answer.done()
    await engine.wake()
    await engine.resume()
    assert (await answer).num_tokens > 0


@in_a_loop
async def test_engine_with_requests_does_not_sleep_and_a_sleeping_one_does_not_work(engine, ask, prompt_of) -> None:
    begun = asyncio.Event()
    answer = asyncio.ensure_future(ask(engine, prompt_of(5), max_new_tokens=100, on_first_token=begun.set))
    await begun.wait()
    with pytest.raises(RuntimeError, match="without requests"):
        await engine.sleep()
    await engine.abort("r")
    await answer
    await engine.pause()
    await engine.sleep()
    for work in (engine.resume(), engine.begin_weights(), engine.score((1, 2))):
        with pytest.raises(RuntimeError, match="wake it first"):
            await work
    assert await engine.sleep() == 0, "nothing is freed twice"
