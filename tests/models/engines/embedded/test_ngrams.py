"""Drafts by n-grams change how many passes an engine makes, and nothing that it answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.embedded.fused_decoder import FusedDecoder
from grmpipe.models.engines.embedded.ngrams import LONGEST_DRAFT, NgramTable
from grmpipe.models.types import Completion, ModelFiles, WeightBucket

ROUNDS = 3


def test_a_draft_repeats_what_followed_the_same_tokens_last() -> None:
    table = NgramTable()
    table.follow((1, 2, 3, 4, 5, 9, 2, 3, 4, 6))
    assert table.follow((7, 2, 3, 4)).propose(LONGEST_DRAFT) == [6]
    assert table.follow((7, 3, 4, 5)).propose(2) == [9, 2]
    assert table.follow((7, 8, 8)).propose(LONGEST_DRAFT) == []


def test_a_draft_is_as_long_as_what_was_accepted_lately() -> None:
    table = NgramTable()
    draft = table.follow((1, 2, 3) * 6)
    lengths = []
    for sampled in ((9,), (1, 2), (1, 2, 3), (1, 2, 3, 1)):
        proposed = draft.propose(LONGEST_DRAFT)
        lengths.append(len(proposed))
        draft.settle(len(proposed), sampled)
        draft.text += [1, 2, 3]
    assert lengths[:3] == [LONGEST_DRAFT, 1, 2]
    assert (draft.num_drafted, draft.num_accepted) == (sum(lengths), 0 + 1 + 2 + 3)


async def varied(engine: EmbeddedEngine, ask: Any, prompt_of: Any) -> list[Completion]:
    """Requests of several kinds at once, in rounds, so that each repeats texts of the one before."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_new_tokens": 30},
        {"temperature": 0.3, "max_new_tokens": 24},
        {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.01, "max_new_tokens": 17},
        {"temperature": 0.0, "max_new_tokens": 25, "stop": ("e", "\x1c")},
        {"temperature": 0.1, "max_new_tokens": 12, "pattern": "(Score: [0-9]{4} ){2}"},
        {"temperature": 1.0, "max_new_tokens": 9},
    ]
    rounds = [
        await asyncio.gather(
            *(ask(engine, prompt_of(12 + n % 2), f"{n}", **kind) for n, kind in enumerate(kinds)),
        )
        for _ in range(ROUNDS)
    ]
    return [completion for completions in rounds for completion in completions]


def assert_alike(drafted: list[Completion], plain: list[Completion]) -> None:
    """Tokens, ends, texts and versions are equal; log-probs to 1e-4; and drafts did come true."""
    assert sum(one.accepted_tokens for one in drafted) > 0
    for one, other in zip(drafted, plain, strict=True):
        assert (one.token_ids, one.finish_reason, one.text, one.stop_text) == (
            other.token_ids,
            other.finish_reason,
            other.text,
            other.stop_text,
        )
        assert one.versions == other.versions
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_tokens_ends_and_logprobs_are_those_without_drafts(
    open_engine: Any, ask: Any, prompt_of: Any, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    if not fused:
        monkeypatch.setattr(FusedDecoder, "supports", lambda model: False)
    drafting = open_engine(speculation="ngram")
    drafted = asyncio.run(varied(drafting, ask, prompt_of))
    assert_alike(drafted, asyncio.run(varied(open_engine(), ask, prompt_of)))
    assert drafting.stats().sampled_tokens == sum(one.num_tokens for one in drafted)


def test_a_push_in_flight_gives_each_token_the_version_that_sampled_it(
    open_engine: Any, ask: Any, prompt_of: Any, next_version_path: str, plain: Any, next_plain: Any
) -> None:
    """A table that knows the text under the old weights drafts wrongly under the new ones."""
    engine = open_engine(speculation="ngram", recompute_kv_on_sync=True)
    prompt_ids = prompt_of(12)

    async def work() -> Completion:
        await ask(engine, prompt_ids, "before", temperature=0.0, max_new_tokens=60)
        begun = asyncio.Event()
        asked = asyncio.create_task(
            ask(engine, prompt_ids, "across", temperature=0.0, max_new_tokens=60, on_first_token=begun.set)
        )
        await begun.wait()
        await engine.pause()
        await engine.begin_weights()
        await engine.load_bucket(WeightBucket(tensors=(), payload=ModelFiles(path=next_version_path)))
        await engine.commit_weights(1)
        await engine.resume()
        completion: Completion = await asked
        return completion

    completion = asyncio.run(work())
    assert [span.version for span in completion.versions] == [0, 1]
    cut = completion.versions[0].end
    assert completion.logprobs[:cut] == pytest.approx(plain.logprobs(prompt_ids, completion)[:cut], abs=1e-3)
    assert completion.logprobs[cut:] == pytest.approx(next_plain.logprobs(prompt_ids, completion)[cut:], abs=1e-3)


def test_later_turns_continue_a_parked_row_as_without_drafts(open_engine: Any, ask: Any, prompt_of: Any) -> None:
    """A rejected token's keys and values must not be taken for those of the next turn."""

    async def turns(engine: EmbeddedEngine) -> list[Completion]:
        completions: list[Completion] = []
        for name in ("a", "b"):
            ids = prompt_of(12)
            for turn in range(4):
                asked = {"trajectory_id": name, "temperature": 0.2, "max_new_tokens": 9}
                completions.append(await ask(engine, ids, f"{turn}", **asked))
                ids = (*ids, *completions[-1].token_ids, 7, 8)
        return completions

    drafting = open_engine(speculation="ngram")
    drafted = asyncio.run(turns(drafting))
    assert sum(one.drafted_tokens for one in drafted) > sum(one.accepted_tokens for one in drafted)
    assert_alike(drafted, asyncio.run(turns(open_engine())))
    assert drafting.stats().cached_tokens > 0


def test_an_aborted_request_keeps_its_tokens_and_a_wide_batch_drafts_nothing(
    open_engine: Any, ask: Any, prompt_of: Any
) -> None:
    engine = open_engine(speculation="ngram", max_batch_rows=100)

    async def work() -> list[Completion]:
        await ask(engine, prompt_of(12), "known", temperature=0.0, max_new_tokens=40)
        begun = asyncio.Event()
        asked = asyncio.create_task(
            ask(engine, prompt_of(12), "long", temperature=0.0, max_new_tokens=100, on_first_token=begun.set)
        )
        await begun.wait()
        await engine.abort("long")
        many = [ask(engine, prompt_of(12), n, temperature=0.0, max_new_tokens=10) for n in range(100)]
        await engine.pause()
        wide = [asyncio.create_task(one) for one in many]
        await asyncio.sleep(0)
        await engine.resume()
        return [await asked, *await asyncio.gather(*wide)]

    aborted, *wide = asyncio.run(work())
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) == len(aborted.logprobs) == aborted.versions[-1].end >= 1
    assert sum(one.drafted_tokens for one in wide) == 0


def test_a_deterministic_engine_makes_no_drafts(open_engine: Any, ask: Any, prompt_of: Any) -> None:
    engine = open_engine(speculation="ngram", batch_invariant=True)
    asked = [ask(engine, prompt_of(12), "same", temperature=0.0, max_new_tokens=20) for _ in range(2)]

    async def work() -> list[Completion]:
        return [await one for one in asked]

    assert sum(one.drafted_tokens for one in asyncio.run(work())) == 0
