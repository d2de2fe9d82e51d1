"""Between the turns of a trajectory its keys and values stay in the engine: only new tokens are prefilled, and no token
or log-prob changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.embedded.kv_slots import MIN_SHARED_TOKENS, ParkedRow, ParkedRows
from grmpipe.models.types import Completion

OBSERVATION = (7, 8)
ANSWER = 3  # tokens
START = 10


async def episode(
    ask: Any, engine: EmbeddedEngine, prompt_ids: Sequence[int], name: str, turns: int, parks: bool = True
) -> list[Completion]:
    """The completions of one trajectory, whose every turn is answered by the same observation."""
    completions, ids = [], tuple(prompt_ids)
    for turn in range(turns):
        trajectory_id = name if parks else ""
        completion = await ask(engine, ids, f"{name}/t{turn}", trajectory_id=trajectory_id, max_new_tokens=ANSWER)
        completions.append(completion)
        ids = (*ids, *completion.token_ids, *OBSERVATION)
    return completions


def played(
    ask: Any, prompt_of: Any, engine: EmbeddedEngine, episodes: int, turns: int, parks: bool
) -> list[list[Completion]]:
    """Several trajectories at once, with prompts of several lengths."""

    async def run() -> list[list[Completion]]:
        return await asyncio.gather(
            *(episode(ask, engine, prompt_of(START + n, seed=n), f"g{n}", turns, parks) for n in range(episodes))
        )

    return asyncio.run(run())


def test_twenty_turns_prefill_less_than_their_length_and_many_times_it_when_nothing_is_parked(
    open_engine: Any, ask: Any, prompt_of: Any
) -> None:
    share = {}
    for parks in (True, False):
        engine = open_engine()
        (completions,) = played(ask, prompt_of, engine, 1, 20, parks)
        length = START + sum(one.num_tokens for one in completions) + 19 * len(OBSERVATION)
        stats = engine.stats()
        assert sum(one.cached_tokens for one in completions) == stats.cached_tokens
        share[parks] = stats.prefilled_tokens / length
        prompts = sum(len(one.token_ids) + len(OBSERVATION) for one in completions)
        assert stats.parked == parks
        assert stats.prefilled_tokens <= prompts + START or not parks
    assert share[True] <= 1.0 < 1.3
    assert share[False] > 8


@pytest.mark.parametrize("rows", [7, 12, 13, 30])
def test_parked_and_unparked_trajectories_sample_the_same(
    open_engine: Any, ask: Any, prompt_of: Any, rows: int
) -> None:
    """Twelve trajectories and few slots or many: rows are parked, moved, continued and dropped all the time."""
    engine = open_engine(max_batch_rows=rows, prefill_tokens=60)
    parked = played(ask, prompt_of, engine, 12, 9, True)
    unparked = played(ask, prompt_of, open_engine(), 12, 9, False)
    stats = engine.stats()
    assert stats.parked == min(12, rows)
    assert stats.cached_tokens > 0 or rows < 12
    for some, others in zip(parked, unparked, strict=True):
        assert [one.token_ids for one in some] == [one.token_ids for one in others]
        for one, other in zip(some, others, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("rows", [9, 30])
def test_a_batch_invariant_engine_gives_the_same_bits_with_and_without_parking(
    open_engine: Any, ask: Any, prompt_of: Any, rows: int
) -> None:
    engine = open_engine(batch_invariant=True, max_batch_rows=rows)
    parked = played(ask, prompt_of, engine, 12, 9, True)
    assert engine.stats().cached_tokens > 0 or rows < 12
    assert parked == played(ask, prompt_of, open_engine(batch_invariant=True), 12, 9, False)


def test_a_request_without_a_trajectory_is_never_parked(engine: EmbeddedEngine, ask: Any, prompt_of: Any) -> None:
    played(ask, prompt_of, engine, 3, 3, False)
    assert engine.stats().parked == engine.stats().cached_tokens == 0


def test_the_end_of_a_trajectory_frees_its_row_and_no_other(engine: EmbeddedEngine, ask: Any, prompt_of: Any) -> None:
    async def run() -> None:
        await asyncio.gather(*(episode(ask, engine, prompt_of(START, seed=n), f"g{n}", 2) for n in range(3)))
        assert engine.stats().parked == 3
        engine.end_trajectory("g1")
        engine.end_trajectory("unknown")
        await engine.abort("nothing")  # a command after it
        assert engine.stats().parked == 2
        cached = engine.stats().cached_tokens
        await ask(engine, prompt_of(START, seed=1), "g1/again", trajectory_id="g1")
        assert engine.stats().cached_tokens == cached, "nothing of it is left"

    asyncio.run(run())


def test_sleep_drops_parked_rows(engine: EmbeddedEngine, ask: Any, prompt_of: Any, plain: Any) -> None:
    async def run() -> None:
        (first,) = await episode(ask, engine, prompt_of(40), "g", 1)
        await engine.pause()
        await engine.sleep()
        assert engine.stats().parked == 0
        await engine.wake()
        await engine.resume()
        ids = (*prompt_of(40), *first.token_ids, *OBSERVATION)
        second = await ask(engine, ids, "g/t1", trajectory_id="g")
        assert second.logprobs == pytest.approx(plain.logprobs(ids, second), abs=1e-3)

    asyncio.run(run())


def test_an_aborted_request_is_not_parked(engine: EmbeddedEngine, ask: Any, prompt_of: Any) -> None:
    async def run() -> None:
        begun = asyncio.Event()
        asked = asyncio.create_task(
            ask(engine, prompt_of(9), trajectory_id="g", max_new_tokens=100, on_first_token=begun.set, stop=("\0\0",))
        )
        async with asyncio.timeout(20):
            await begun.wait()
        await engine.abort("r")
        await asked

    asyncio.run(run())
    assert engine.stats().parked == 0


def test_a_rewritten_history_gets_a_copy_of_what_it_shares_and_leaves_the_rest_to_its_own_turn(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any, plain: Any
) -> None:
    async def run() -> None:
        (first,) = await episode(ask, engine, prompt_of(40), "g", 1)
        before = engine.stats().prefilled_tokens
        other = (*prompt_of(40)[:30], (prompt_of(40)[30] + 1) % 256, *prompt_of(8, seed=5))
        branch = await ask(engine, other, "branch", trajectory_id="g")
        assert engine.stats().prefilled_tokens - before == 8  # without the shared 30, and the last, which is decoded
        assert branch.logprobs == pytest.approx(plain.logprobs(other, branch), abs=1e-3)
        ids = (*prompt_of(40), *first.token_ids, *OBSERVATION)
        second = await ask(engine, ids, "g/t1", trajectory_id="g")
        assert engine.stats().prefilled_tokens - before == 8 + len(OBSERVATION)
        assert second.logprobs == pytest.approx(plain.logprobs(ids, second), abs=1e-3)

    asyncio.run(run())


def test_a_sibling_that_comes_after_all_others_have_left_takes_their_prompt(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any, plain: Any
) -> None:
    async def run() -> None:
        await episode(ask, engine, prompt_of(40), "g/0", 1)
        (late,) = await episode(ask, engine, prompt_of(40), "g/1", 1)
        assert engine.stats().prefilled_tokens == 39
        assert late.logprobs == pytest.approx(plain.logprobs(prompt_of(40), late), abs=1e-3)

    asyncio.run(run())


def test_rows_that_wait_for_their_next_turn_are_no_part_of_the_batch(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any
) -> None:
    """Decoding gets the running rows only, however many are parked."""
    played(ask, prompt_of, engine, 20, 1, True)
    verify, sizes = engine._worker._batch._decoder.verify, set()

    def seen(token_ids_BQ: Any, positions_BQ: Any, num_attended: int, adapters: Any) -> Any:
        sizes.add(len(token_ids_BQ))
        return verify(token_ids_BQ, positions_BQ, num_attended, adapters)

    engine._worker._batch._decoder.verify = seen  # type: ignore[method-assign]
    asyncio.run(ask(engine, prompt_of(9)))
    assert engine.stats().parked == 20
    assert sizes == {1}


def test_the_trajectory_itself_comes_before_its_siblings_and_a_part_too_short_is_prefilled() -> None:
    rows = ParkedRows()
    own = ParkedRow(model="", trajectory_id="g/0", group_id="g", token_ids=tuple(range(20)), index=3)
    sibling = ParkedRow(model="", trajectory_id="g/1", group_id="g", token_ids=tuple(range(40)), index=4)
    stranger = ParkedRow(model="", trajectory_id="h/0", group_id="h", token_ids=tuple(range(100)), index=5)
    for row in (stranger, sibling, own):
        rows.park(row)
    asked = tuple(range(50))
    found = rows.prefix_for("", "g/0", "g", asked)
    assert found is not None and (found.row, found.num_tokens, found.taken) == (own, 20, True)
    found = rows.prefix_for("", "g/2", "g", asked)
    assert found is not None and (found.row, found.num_tokens, found.taken) == (sibling, 40, False)
    assert rows.prefix_for("", "g/2", "g", (*range(MIN_SHARED_TOKENS - 1), 99, 99)) is None
    rows.drop_oldest()
    assert [*rows] == [sibling, own]
