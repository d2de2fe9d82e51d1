"""The embedded engine restricts a request to its pattern, and no other request in the batch."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable

import pytest

from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.types import Completion, EngineRefused

SHORT = r"Score: (?:1|2|10)"
ENDLESS = "(?:a|b)*c"


def test_texts_match_their_pattern_and_rows_without_one_are_as_they_would_be(
    engine: EmbeddedEngine, ask: Callable, prompt_of: Callable
) -> None:
    async def go() -> tuple[list[Completion], list[Completion]]:
        free = [ask(engine, prompt_of(9, seed), f"free{seed}", max_new_tokens=12) for seed in range(3)]
        alone = await asyncio.gather(*free)
        again = [ask(engine, prompt_of(9, seed), f"free{seed}", max_new_tokens=12) for seed in range(3)]
        held = [ask(engine, prompt_of(9, seed), seed, max_new_tokens=40, pattern=SHORT) for seed in range(8)]
        mixed = await asyncio.gather(*again, *held)
        assert [one.token_ids for one in mixed[:3]] == [one.token_ids for one in alone]
        return alone, mixed[3:]

    _, held = asyncio.run(go())
    assert all(re.fullmatch(SHORT, completion.text) for completion in held)
    assert all(completion.finish_reason == "stop" for completion in held)
    assert len({completion.text for completion in held}) > 1


def test_logprobs_are_those_of_what_the_pattern_left(
    engine: EmbeddedEngine, ask: Callable, prompt_of: Callable
) -> None:
    """If only one token is allowed, its log-prob is 0."""
    completion = asyncio.run(ask(engine, prompt_of(9), max_new_tokens=40, pattern=SHORT))
    forced = completion.logprobs[: len("Score: ")]
    assert all(logprob == pytest.approx(0.0, abs=1e-6) for logprob in forced)
    assert completion.logprobs[len("Score: ")] < 0
    assert all(math.isfinite(logprob) for logprob in completion.logprobs)


def test_greedy_rows_are_held_too(engine: EmbeddedEngine, ask: Callable, prompt_of: Callable) -> None:
    completion = asyncio.run(ask(engine, prompt_of(9), max_new_tokens=40, pattern=SHORT, temperature=0.0))
    assert re.fullmatch(SHORT, completion.text)


def test_a_pattern_that_it_cannot_read_is_refused(engine: EmbeddedEngine, ask: Callable, prompt_of: Callable) -> None:
    with pytest.raises(EngineRefused, match="not a regex that the embedded engine can read"):
        asyncio.run(ask(engine, prompt_of(9), pattern="(?=Score)"))


def test_a_cancelled_call_frees_its_row_at_once(engine: EmbeddedEngine, ask: Callable, prompt_of: Callable) -> None:
    async def go() -> None:
        begun = asyncio.Event()
        call = asyncio.ensure_future(
            ask(engine, prompt_of(9), on_first_token=begun.set, max_new_tokens=80, pattern=ENDLESS)
        )
        await begun.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await engine.abort("nothing")  # a command after that of the cancelled call
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
        assert engine.stats().sampled_tokens < 80

    asyncio.run(go())
