"""What every engine samples and reports, and how a request ends."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from grmpipe.models.types import Completion, EngineRefused, PromptScoring, VersionSpan

WINDOW = 128
STOP = 256  # <|im_end|>, after 256 bytes
NUM_PRINTABLE = 94


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.8), (0.0, 1.0)])
def test_logprobs_are_those_of_transformers_after_temperature_and_top_p(
    engine: Any, ask: Any, run: Any, prompt_of: Any, plain: Any, temperature: float, top_p: float, tolerance: float
) -> None:
    async def sample() -> list[Completion]:
        asked = (ask(engine, prompt_of(10 + i), i, temperature=temperature, top_p=top_p) for i in range(6))
        return await asyncio.gather(*asked)

    for i, completion in enumerate(run(sample())):
        expected = plain.logprobs(prompt_of(10 + i), completion, temperature, top_p)
        assert completion.logprobs == pytest.approx(expected, abs=tolerance)
        assert len(completion.token_ids) == len(completion.logprobs) == 8
        assert completion.versions == (VersionSpan(model="policy", version=0, start=0, end=8),)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_likely_tokens_are_those_of_transformers_after_temperature(
    engine: Any, ask: Any, run: Any, prompt_of: Any, plain: Any, temperature: float, tolerance: float
) -> None:
    async def sample() -> list[Completion]:
        """Others in the batch ask for fewer, or none."""
        asked = (
            ask(engine, prompt_of(10 + i), i, temperature=temperature, top_logprobs=top_k)
            for i, top_k in enumerate((5, 0, 20, 5))
        )
        return await asyncio.gather(*asked)

    for i, (completion, top_k) in enumerate(zip(run(sample()), (5, 0, 20, 5), strict=True)):
        assert len(completion.logprobs) == 8
        if not top_k:
            assert completion.top is None
            continue
        ids = (*prompt_of(10 + i), *completion.token_ids)
        logprobs_TV = (plain.logits(ids)[-9:-1] / (temperature or 1)).log_softmax(-1)
        top = logprobs_TV.topk(top_k)
        assert completion.top.ids_TK.shape == completion.top.logprobs_TK.shape == (8, 1 + top_k)
        assert tuple(completion.top.ids_TK[:, 0]) == completion.token_ids
        assert completion.top.logprobs_TK[:, 0] == pytest.approx(completion.logprobs, abs=1e-6)
        assert completion.top.logprobs_TK[:, 1:] == pytest.approx(top.values.numpy(), abs=tolerance)
        likeliest = np.take_along_axis(logprobs_TV.numpy(), completion.top.ids_TK[:, 1:3].astype(np.int64), 1)
        assert (likeliest >= top.values[:, :2].numpy() - tolerance).all(), "of less likely ones some are tied"


def test_temperature_zero_is_greedy(engine: Any, ask: Any, run: Any, prompt_of: Any, greedy: Any) -> None:
    completion = run(ask(engine, prompt_of(25), max_new_tokens=30, temperature=0.0))
    assert list(completion.token_ids) == greedy(prompt_of(25), 30)
    assert completion.finish_reason == "length"


def test_a_seed_draws_the_same_tokens_alone_and_in_any_batch(
    engine: Any, ask: Any, run: Any, prompt_of: Any, tolerance: float
) -> None:
    async def alone_and_in_a_batch() -> tuple[Completion, Completion]:
        alone = await ask(engine, prompt_of(20), "alone", max_new_tokens=30, seed=11)
        others = [asyncio.create_task(ask(engine, prompt_of(5 + i), f"o{i}", max_new_tokens=40)) for i in range(6)]
        again = await ask(engine, prompt_of(20), "again", max_new_tokens=30, seed=11, priority=-1)
        await asyncio.gather(*others)
        return alone, again

    alone, again = run(alone_and_in_a_batch())
    assert alone.token_ids == again.token_ids
    assert alone.logprobs == pytest.approx(again.logprobs, abs=tolerance)


def test_siblings_differ_and_share_their_prefill(
    engine: Any, kind: Any, ask: Any, run: Any, prompt_of: Any, plain: Any, tolerance: float
) -> None:
    prompt = prompt_of(70, seed=3)
    before = kind.prefilled(engine)

    async def siblings() -> list[Completion]:
        return await asyncio.gather(*(ask(engine, prompt, f"s{i}", max_new_tokens=12) for i in range(4)))

    completions = run(siblings())
    assert len({completion.token_ids for completion in completions}) == 4
    assert kind.prefilled(engine) - before < 2 * len(prompt)
    for completion in completions:
        assert completion.logprobs == pytest.approx(plain.logprobs(prompt, completion), abs=tolerance)


def test_a_later_turn_of_a_trajectory_prefills_little_more_than_its_new_tokens(
    engine: Any, kind: Any, ask: Any, run: Any, prompt_of: Any, plain: Any, tolerance: float
) -> None:
    """vLLM shares whole blocks of 32 tokens."""

    async def turns() -> tuple[int, int]:
        ids, prompt_tokens, cached_tokens = prompt_of(40, seed=8), 0, 0
        for turn in range(5):
            prompt_tokens += len(ids)
            completion = await ask(engine, ids, f"turn{turn}", trajectory_id="turns", max_new_tokens=6)
            assert completion.logprobs == pytest.approx(plain.logprobs(ids, completion), abs=tolerance)
            cached_tokens += completion.cached_tokens
            ids = (*ids, *completion.token_ids, *prompt_of(4, seed=turn))
        return prompt_tokens, cached_tokens

    before = kind.prefilled(engine)
    prompt_tokens, cached_tokens = run(turns())
    assert prompt_tokens > 250
    assert kind.prefilled(engine) - before < prompt_tokens / 2 < cached_tokens


def test_the_text_ends_before_a_stop_string_and_the_ids_with_it(
    engine: Any, ask: Any, run: Any, prompt_of: Any
) -> None:
    whole = run(ask(engine, prompt_of(12), max_new_tokens=60, seed=2))
    letter = next(shown(token_id) for token_id in whole.token_ids[4:] if token_id < NUM_PRINTABLE)
    first = next(i for i, token_id in enumerate(whole.token_ids) if shown(token_id) == letter)
    completion = run(ask(engine, prompt_of(12), "again", max_new_tokens=60, stop=(letter,), seed=2))
    assert completion.token_ids == whole.token_ids[: first + 1]
    assert completion.finish_reason == "stop"
    assert letter not in completion.text and (completion.stop_text, whole.stop_text) == (letter, "")
    assert whole.text.startswith(completion.text)


def test_a_stop_token_is_sampled_and_not_shown(
    engine: Any, ask: Any, run: Any, prompt_of: Any, plain: Any, kind: Any, tolerance: float
) -> None:
    """<|im_end|> has probability of about 1/272 per token: one of many requests samples it."""

    async def sample() -> list[Completion]:
        return await asyncio.gather(*(ask(engine, prompt_of(9), i, max_new_tokens=100) for i in range(24)))

    ended = [completion for completion in run(sample()) if completion.finish_reason == "stop"]
    assert ended
    for completion in ended:
        assert completion.token_ids[-1] == STOP and STOP not in completion.token_ids[:-1]
        assert "<|im_end|>" not in completion.text
        assert completion.logprobs == pytest.approx(plain.logprobs(prompt_of(9), completion), abs=tolerance)


def test_first_token_is_reported_once_and_before_the_end(
    engine: Any, ask: Any, run: Any, prompt_of: Any, begun: Any
) -> None:
    async def sample() -> bool:
        asked = asyncio.create_task(ask(engine, prompt_of(20), max_new_tokens=100, on_first_token=begun))
        await begun.wait()
        early = not asked.done()
        await asked
        return early

    assert run(sample())
    assert begun.num_calls == 1


def test_a_request_id_in_flight_gets_that_requests_answer(engine: Any, ask: Any, run: Any, prompt_of: Any) -> None:
    async def twice() -> list[Completion]:
        return await asyncio.gather(*(ask(engine, prompt_of(20), "same", max_new_tokens=40, seed=i) for i in (1, 2)))

    first, second = run(twice())
    assert first == second


def test_an_abort_returns_what_there_is(
    engine: Any, ask: Any, run: Any, prompt_of: Any, plain: Any, begun: Any, tolerance: float
) -> None:
    async def abort_one() -> tuple[Completion, Completion]:
        asked = asyncio.create_task(ask(engine, prompt_of(20), "a", max_new_tokens=100, on_first_token=begun))
        beside = asyncio.create_task(ask(engine, prompt_of(22), "b", max_new_tokens=50))
        await begun.wait()
        await engine.abort("a")
        await engine.abort("nobody")
        return await asked, await beside

    aborted, beside = run(abort_one())
    assert aborted.finish_reason == "abort" and beside.finish_reason == "length"
    assert 0 < len(aborted.token_ids) == len(aborted.logprobs) < 100
    assert aborted.versions == (VersionSpan(model="policy", version=0, start=0, end=len(aborted.token_ids)),)
    assert aborted.logprobs == pytest.approx(plain.logprobs(prompt_of(20), aborted), abs=tolerance)


def test_waiting_requests_can_be_aborted(engine: Any, ask: Any, run: Any, prompt_of: Any) -> None:
    async def abort_at_once() -> Completion:
        await engine.pause()
        asked = asyncio.create_task(ask(engine, prompt_of(20), "a"))
        await asyncio.sleep(0)
        await engine.abort("a")
        await engine.resume()
        return await asked

    completion = run(abort_at_once())
    assert (completion.token_ids, completion.text, completion.finish_reason) == ((), "", "abort")
    assert completion.versions == (VersionSpan(model="policy", version=0, start=0, end=0),)


def test_cancelling_the_call_aborts_the_request_unless_another_waits(
    engine: Any, ask: Any, run: Any, prompt_of: Any, begun: Any
) -> None:
    async def cancel() -> Completion:
        first = asyncio.create_task(ask(engine, prompt_of(20), "c", max_new_tokens=100, on_first_token=begun))
        second = asyncio.create_task(ask(engine, prompt_of(20), "c", max_new_tokens=100))
        await begun.wait()
        first.cancel()
        completion = await second
        third = asyncio.create_task(ask(engine, prompt_of(20), "d", max_new_tokens=100))
        await asyncio.sleep(0.01)
        third.cancel()
        await asyncio.gather(first, third, return_exceptions=True)
        assert third.cancelled()
        fresh = await ask(engine, prompt_of(20), "d", max_new_tokens=3, seed=99)  # not the cancelled request's answer
        assert len(fresh.token_ids) == 3
        return completion

    assert run(cancel()).finish_reason != "abort"


def test_the_more_urgent_of_those_that_wait_goes_first(engine: Any, ask: Any, run: Any, prompt_of: Any) -> None:
    async def order() -> list[str]:
        begun: list[str] = []
        await engine.pause()
        asked = []
        for i, (name, priority) in enumerate([*((f"low{n}", 5) for n in range(8)), ("high", -1)]):
            tell = partial(begun.append, name)
            request = ask(engine, prompt_of(10 + i), name, priority=priority, max_new_tokens=20, on_first_token=tell)
            asked.append(asyncio.create_task(request))
        await asyncio.sleep(0.05)
        await engine.resume()
        await asyncio.gather(*asked)
        return begun

    assert "high" in run(order())[:4]  # four run at once


def test_a_score_is_transformers_log_prob_of_every_token_but_the_first(
    engine: Any, run: Any, prompt_of: Any, plain: Any, ask: Any, tolerance: float
) -> None:
    async def beside_sampling() -> tuple[Any, Completion]:
        asked = asyncio.create_task(ask(engine, prompt_of(20), "beside", max_new_tokens=60, temperature=0.7))
        scores = [await engine.score(prompt_of(length)) for length in (2, 33, 70, WINDOW)]
        return scores, await asked

    scores, beside = run(beside_sampling())
    for length, scored in zip((2, 33, 70, WINDOW), scores, strict=True):
        ids = prompt_of(length)
        logprobs_TV = plain.logits(ids)[:-1].log_softmax(-1)
        expected = [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, ids[1:], strict=True)]
        assert scored == pytest.approx(expected, abs=tolerance)
    assert beside.logprobs == pytest.approx(plain.logprobs(prompt_of(20), beside, 0.7), abs=tolerance)
    assert run(engine.score(prompt_of(1))) == ()


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_prompt_is_scored_beside_sampling_with_the_likeliest_tokens_of_transformers(
    engine: Any, run: Any, prompt_of: Any, plain: Any, ask: Any, top_k: int, tolerance: float
) -> None:
    lengths = (9, 33, 70, WINDOW - bool(top_k))

    async def beside_sampling() -> tuple[list[Completion], Completion]:
        asked = asyncio.create_task(ask(engine, prompt_of(20), "beside", max_new_tokens=60, temperature=0.7))
        scoring = PromptScoring(start=7, top_k=top_k)
        scored = (ask(engine, prompt_of(n), f"scored{n}", max_new_tokens=1, scoring=scoring) for n in lengths)
        return await asyncio.gather(*scored), await asked

    completions, beside = run(beside_sampling())
    for length, completion in zip(lengths, completions, strict=True):
        ids, scores = prompt_of(length), completion.scores
        logprobs_NV = plain.logits(ids)[6:-1].log_softmax(-1)
        expected = [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_NV, ids[7:], strict=True)]
        assert scores.logprobs_N == pytest.approx(expected, abs=tolerance)
        assert (completion.token_ids, completion.finish_reason) == ((), "stop")
        assert completion.versions == (VersionSpan(model="policy", version=0, start=0, end=0),)
        if not top_k:
            assert scores.top_ids_NK is None
            continue
        best = logprobs_NV.topk(top_k)
        assert scores.top_logprobs_NK == pytest.approx(best.values.numpy(), abs=tolerance)
        at_their_ids = logprobs_NV.gather(-1, torch.from_numpy(scores.top_ids_NK).long())
        assert scores.top_logprobs_NK == pytest.approx(at_their_ids.numpy(), abs=tolerance)
    assert beside.logprobs == pytest.approx(plain.logprobs(prompt_of(20), beside, 0.7), abs=tolerance)


def test_a_score_waits_for_the_end_of_a_pause(engine: Any, run: Any, prompt_of: Any, ask: Any) -> None:
    async def paused() -> tuple[bool, Completion]:
        await engine.pause()
        scoring = asyncio.create_task(
            ask(engine, prompt_of(30), "s", max_new_tokens=1, scoring=PromptScoring(start=20))
        )
        await asyncio.sleep(0.2)
        waited = not scoring.done()
        await engine.resume()
        return waited, await scoring

    waited, completion = run(paused())
    assert waited and len(completion.scores.logprobs_N) == 10


@pytest.mark.parametrize("start", [0, 30])
def test_nothing_is_scored_that_nothing_predicts_or_that_does_not_come(
    engine: Any, run: Any, prompt_of: Any, ask: Any, start: int
) -> None:
    with pytest.raises(EngineRefused, match="can't be scored"):
        run(ask(engine, prompt_of(30), max_new_tokens=1, scoring=PromptScoring(start=start)))


def test_a_pattern_is_kept_to_or_refused(engine: Any, ask: Any, run: Any, prompt_of: Any) -> None:
    completion = run(ask(engine, prompt_of(20), max_new_tokens=40, pattern=r"score: ([0-9]|10)\."))
    assert completion.text in {f"score: {n}." for n in range(11)}
    assert completion.finish_reason == "stop"
    assert all(logprob <= 0 for logprob in completion.logprobs)
    assert len({*completion.logprobs}) < len(completion.logprobs)  # if the form leaves no choice, it is certain: 0
    with pytest.raises(EngineRefused, match="regex"):
        run(ask(engine, prompt_of(20), "broken", pattern="[0-9"))


@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"stop": ("",)},
        {"max_new_tokens": WINDOW - 19},
    ],
)
def test_impossible_request_is_refused_and_harms_no_other_request(
    engine: Any, ask: Any, run: Any, prompt_of: Any, params: dict[str, Any]
) -> None:
    with pytest.raises(EngineRefused):
        run(ask(engine, prompt_of(20), **params))
    assert len(run(ask(engine, prompt_of(20), "after", max_new_tokens=WINDOW - 20)).token_ids) <= WINDOW - 20


@pytest.mark.parametrize("prompt_ids", [(), (5, 272), (-1, 5)])
def test_ids_that_the_model_does_not_know_are_refused(
    engine: Any, ask: Any, run: Any, prompt_ids: tuple[int, ...]
) -> None:
    with pytest.raises(EngineRefused):
        run(ask(engine, prompt_ids))
    with pytest.raises(EngineRefused):
        run(engine.score(prompt_ids))


def shown(token_id: int) -> str:
    """The byte tokenizer has printable ASCII first, from '!' on."""
    return chr(token_id + ord("!")) if token_id < NUM_PRINTABLE else ""
