"""Prompts are prefilled in pieces that follow the machine's speed, between which the engine answers; pieces change no
token.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from grmpipe.models.engines.embedded.decoder import ModuleDecoder
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.embedded.fused_decoder import FusedDecoder
from grmpipe.models.engines.embedded.prompt_packing import FIRST_TOKENS, LEAST_TOKENS, PIECE_S, PrefillPace
from grmpipe.models.types import Completion, PromptScoring


def test_pieces_take_as_many_tokens_as_the_last_one_took_in_the_time() -> None:
    pace = PrefillPace(8192)
    assert pace.tokens == FIRST_TOKENS
    for num_tokens, seconds, then in (
        (64, 2 * PIECE_S, 32),
        (32, PIECE_S / 10, 320),
        (320, 100 * PIECE_S, LEAST_TOKENS),
        (LEAST_TOKENS - 1, 1e-9, LEAST_TOKENS),  # too few to measure
        (32, 0.0, 8192),
    ):
        pace.note(num_tokens, seconds)
        assert pace.tokens == then


def test_pieces_are_never_larger_than_the_limit_and_fixed_ones_always_as_large() -> None:
    low, fixed = PrefillPace(20), PrefillPace(20, is_fixed=True)
    for pace in (low, fixed):
        pace.note(20, 100 * PIECE_S)
        assert pace.tokens == 20


@pytest.fixture(params=[FusedDecoder, ModuleDecoder])
def open_with(request: pytest.FixtureRequest, open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens engines whose model is decoded by this decoder."""
    monkeypatch.setattr(FusedDecoder, "supports", lambda model: request.param is FusedDecoder)
    return open_engine


def test_prompts_in_pieces_give_the_same_tokens_and_log_probs(open_with: Any, ask: Any, prompt_of: Any) -> None:
    """Long and short prompts, siblings that come before the prompt is complete, and rows that decode meanwhile."""
    prompts = [prompt_of(n) for n in (5, 90, 90, 33, 90, 1, 100, 61, 12)]

    async def run(engine: EmbeddedEngine) -> list[Completion]:
        asked = (ask(engine, ids, i, max_new_tokens=5 + i, temperature=0.0) for i, ids in enumerate(prompts))
        return await asyncio.gather(*asked)

    whole, in_pieces = open_with(), open_with(prefill_tokens=7, speculation="ngram")
    for one, other in zip(asyncio.run(run(whole)), asyncio.run(run(in_pieces)), strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert in_pieces.stats().prefilled_tokens == whole.stats().prefilled_tokens, "siblings prefill once"


def test_pieces_get_smaller_when_the_clock_says_that_one_took_long(open_engine: Any, ask: Any, prompt_of: Any) -> None:
    engine = open_engine()
    engine._worker._batch._clock = itertools.count(step=2 * PIECE_S).__next__
    pieces = count_prefilled(engine)
    asyncio.run(ask(engine, prompt_of(120)))
    assert pieces == [FIRST_TOKENS, FIRST_TOKENS // 2, 119 - FIRST_TOKENS - FIRST_TOKENS // 2]


def test_rows_go_on_decoding_between_the_pieces_of_another_prompt(open_engine: Any, ask: Any, prompt_of: Any) -> None:
    engine = open_engine(prefill_tokens=10)

    async def run() -> None:
        begun = asyncio.Event()
        asked = asyncio.create_task(ask(engine, prompt_of(4), 0, max_new_tokens=120, on_first_token=begun.set))
        await begun.wait()
        at_first_token = []
        late = ask(
            engine, prompt_of(101), 1, on_first_token=lambda: at_first_token.append(engine.stats().sampled_tokens)
        )
        await late
        await engine.abort("0")
        await asked
        assert at_first_token[0] > 100 // 11

    asyncio.run(run())


def test_an_engine_answers_between_the_pieces_of_a_prompt(open_engine: Any, ask: Any, prompt_of: Any) -> None:
    engine = open_engine(prefill_tokens=10)

    async def run() -> None:
        asked = asyncio.create_task(ask(engine, prompt_of(101)))
        async with hold_piece(engine):
            check, pause = asyncio.create_task(engine.abort("unknown")), asyncio.create_task(engine.pause())
            await asyncio.sleep(0)
        await check
        await pause
        assert engine.stats().prefilled_tokens == 10 and not asked.done()
        await engine.resume()
        assert (await asked).token_ids

    asyncio.run(run())


def test_a_request_that_is_aborted_between_its_pieces_leaves_the_others_as_they_are(
    open_engine: Any, ask: Any, prompt_of: Any, plain: Any
) -> None:
    engine = open_engine(prefill_tokens=10)

    async def run() -> None:
        gone = asyncio.create_task(ask(engine, prompt_of(101), "gone"))
        sibling = asyncio.create_task(ask(engine, prompt_of(101), "sibling"))
        async with hold_piece(engine):
            abort = asyncio.create_task(engine.abort("gone"))
            await asyncio.sleep(0)
        await abort
        assert ((await gone).token_ids, (await gone).finish_reason) == ((), "abort")
        assert (await sibling).logprobs == pytest.approx(plain.logprobs(prompt_of(101), await sibling), abs=1e-3)

    asyncio.run(run())
    assert engine.stats().running == engine.stats().waiting == 0


def test_scores_in_passes_are_the_same_and_the_engine_answers_between_them(
    open_engine: Any, ask: Any, prompt_of: Any
) -> None:
    whole, in_passes = open_engine(), open_engine(prefill_tokens=10)

    def score(engine: EmbeddedEngine, length: int) -> asyncio.Task[Completion]:
        scoring = PromptScoring(start=30, top_k=3)
        return asyncio.create_task(ask(engine, prompt_of(length), length, max_new_tokens=1, scoring=scoring))

    async def run() -> None:
        expected = [await score(whole, n) for n in (101, 90)]
        gone, *asked = (score(in_passes, n) for n in (100, 101, 90))
        async with hold_piece(in_passes, of="score"):
            abort = asyncio.create_task(in_passes.abort("100"))
            await asyncio.sleep(0)
        await abort
        assert (await gone).scores is None
        for one, other in zip(expected, await asyncio.gather(*asked), strict=True):
            assert one.scores is not None and other.scores is not None
            assert one.scores.logprobs_N == pytest.approx(other.scores.logprobs_N, abs=1e-4)
            assert (one.scores.top_ids_NK == other.scores.top_ids_NK).all()

    asyncio.run(run())
    assert in_passes.stats().waiting == 0


def count_prefilled(engine: EmbeddedEngine) -> list[int]:
    """The tokens of each step that prefills any: the list grows."""
    step, counts = engine._worker._batch.step, []

    def counted_step() -> Any:
        before = engine.stats().prefilled_tokens
        changes = step()
        if (added := engine.stats().prefilled_tokens - before) > 0:
            counts.append(added)
        return changes

    engine._worker._batch.step = counted_step  # type: ignore[method-assign]
    return counts


@contextlib.asynccontextmanager
async def hold_piece(engine: EmbeddedEngine, of: str = "prefill") -> AsyncIterator[None]:
    """Context: the engine is in its first forward pass of prefilling, or scoring, until the context ends."""
    owner: Any = engine._worker._batch._decoder if of == "prefill" else engine._worker._model
    name = "prefill" if of == "prefill" else "forward"
    loop, begun, ended, forward = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), getattr(owner, name)

    def hold(*args: Any, **kwargs: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        assert ended.wait(20)
        return forward(*args, **kwargs)

    setattr(owner, name, hold)
    async with asyncio.timeout(20):
        await begun.wait()
    yield
    ended.set()
