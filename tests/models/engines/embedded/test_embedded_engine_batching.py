"""Rows join and leave a running batch, which doesn't affect the result of any row."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.types import Completion, EngineDied, EngineRefused

STOP_TOKEN = 256  # the first after the bytes


def test_logprobs_equal_a_plain_forward_over_joins_leaves_and_siblings(
    open_engine: Any, ask: Any, prompt_of: Any, plain: Any
) -> None:
    """Few rows and a small budget: joins and leaves all the time. Every fourth request is a sibling of another."""
    engine = open_engine(max_batch_rows=6, prefill_tokens=50)
    variety = [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8), (0.0, 1.0), (1.0, 0.5)]
    requests = [
        (prompt_of(1 + (7 * i) % 45, seed=i % 4), 1 + (11 * i) % 40, *variety[i % len(variety)]) for i in range(30)
    ] + [(prompt_of(20), 5 + 3 * i, 1.0, 1.0) for i in range(10)]

    async def run() -> list[Completion]:
        return await asyncio.gather(
            *(
                ask(engine, prompt_ids, i, max_new_tokens=length, temperature=temperature, top_p=top_p)
                for i, (prompt_ids, length, temperature, top_p) in enumerate(requests)
            )
        )

    completions = asyncio.run(run())
    for (prompt_ids, length, temperature, top_p), completion in zip(requests, completions, strict=True):
        assert len(completion.token_ids) == length or completion.finish_reason == "stop"
        expected = plain.logprobs(prompt_ids, completion, temperature, top_p)
        assert completion.logprobs == pytest.approx(expected, abs=1e-3)
    stats = engine.stats()
    assert (stats.finished, stats.waiting, stats.running) == (40, 0, 0)
    assert stats.sampled_tokens == sum(len(completion.token_ids) for completion in completions)
    assert stats.busy_s > 0
    assert not engine._worker._batch._siblings_by_prompt  # nothing is kept of ended requests


def test_a_seed_draws_the_same_tokens_alone_and_in_company(engine: EmbeddedEngine, ask: Any, prompt_of: Any) -> None:
    async def run() -> None:
        alone = await ask(engine, prompt_of(9), "me", max_new_tokens=30)
        others = [ask(engine, prompt_of(5 + i), i, max_new_tokens=5 + i, temperature=0.5) for i in range(12)]
        *_, together = await asyncio.gather(*others, ask(engine, prompt_of(9), "me", max_new_tokens=30))
        assert together.token_ids == alone.token_ids
        other_seed = await ask(engine, prompt_of(9), "you", max_new_tokens=30)
        assert other_seed.token_ids != alone.token_ids

    asyncio.run(run())


def test_greedy_takes_the_likeliest_token(engine: EmbeddedEngine, ask: Any, prompt_of: Any, plain: Any) -> None:
    prompt_ids = prompt_of(12)
    completion = asyncio.run(ask(engine, prompt_ids, max_new_tokens=20, temperature=0.0))
    logits_TV = plain.logits((*prompt_ids, *completion.token_ids))[len(prompt_ids) - 1 : -1]
    assert completion.token_ids == tuple(logits_TV.argmax(-1).tolist())
    assert completion.logprobs == pytest.approx(plain.logprobs(prompt_ids, completion), abs=1e-3)


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_the_likeliest_token_alone_is_what_greedy_takes(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any, limit: dict[str, Any]
) -> None:
    async def run() -> list[Completion]:
        limited = ask(engine, prompt_of(12), "limited", max_new_tokens=20, temperature=1.3, **limit)
        others = [ask(engine, prompt_of(12), i, max_new_tokens=20, temperature=0.0) for i in range(2)]
        return list(await asyncio.gather(limited, *others))

    limited, greedy, _ = asyncio.run(run())
    assert limited.token_ids == greedy.token_ids and set(limited.logprobs) == {0.0}


def test_siblings_that_join_together_prefill_once(engine: EmbeddedEngine, ask: Any, prompt_of: Any) -> None:
    async def run() -> None:
        await engine.pause()
        asked = [asyncio.create_task(ask(engine, prompt_of(40), i)) for i in range(8)]
        await asyncio.sleep(0)
        await engine.resume()
        completions = await asyncio.gather(*asked)
        assert len({completion.token_ids for completion in completions}) == 8

    asyncio.run(run())
    assert engine.stats().prefilled_tokens == 39  # the last token of a prompt is decoded, not prefilled


def test_a_late_sibling_takes_the_prompt_of_one_that_still_decodes(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any, plain: Any
) -> None:
    """The batch stops itself after five tokens, so that the sibling is certainly late but not too late."""
    stop_after(engine, num_tokens=5)

    async def run() -> None:
        first = asyncio.create_task(ask(engine, prompt_of(40), 0, max_new_tokens=50, temperature=0.0))
        await paused(engine)
        late = asyncio.create_task(ask(engine, prompt_of(40), 1, max_new_tokens=10))
        await asyncio.sleep(0)
        await engine.resume()
        await first
        assert (await late).logprobs == pytest.approx(plain.logprobs(prompt_of(40), await late), abs=1e-3)

    asyncio.run(run())
    assert engine.stats().prefilled_tokens == 39


def test_waiting_requests_go_by_priority_then_arrival(open_engine: Any, ask: Any, prompt_of: Any) -> None:
    engine = open_engine(max_batch_rows=1)
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        await ask(engine, prompt_of(5), name, priority=priority, max_new_tokens=2)
        order.append(name)

    async def run() -> None:
        await engine.pause()
        asked = [asyncio.create_task(one(name, priority)) for name, priority in (("c", 1), ("d", 1), ("a", 0))]
        await asyncio.sleep(0)
        await engine.resume()
        await asyncio.gather(*asked)

    asyncio.run(run())
    assert order == ["a", "c", "d"]


def test_prompts_join_whole_unless_they_are_longer_than_a_piece(open_engine: Any, ask: Any, prompt_of: Any) -> None:
    engine = open_engine(prefill_tokens=50)
    engine._worker._batch._clock = lambda: 0.0  # however busy the machine is
    step, prefilled = engine._worker._batch.step, [0]

    def counted_step() -> Any:
        changes = step()
        prefilled.append(engine.stats().prefilled_tokens)
        return changes

    engine._worker._batch.step = counted_step

    async def run() -> None:
        await engine.pause()
        asked = [asyncio.create_task(ask(engine, prompt_of(n), n, temperature=0.0)) for n in (20, 21, 22, 90, 23, 24)]
        await asyncio.sleep(0)
        await engine.resume()
        await asyncio.gather(*asked)

    asyncio.run(run())
    joined = [after - before for before, after in pairwise(prefilled) if after > before]
    # The others decode beside the long one, which feeds one more of its tokens.
    assert joined == [19 + 20, 21, 50 + 1, 38, 22 + 23]


def test_a_request_beyond_the_window_is_refused_with_its_lengths(open_engine: Any, ask: Any, prompt_of: Any) -> None:
    engine = open_engine(max_context_tokens=32)
    assert len(asyncio.run(ask(engine, prompt_of(20), max_new_tokens=12, temperature=0.0)).token_ids) <= 12
    with pytest.raises(EngineRefused, match=r"20 tokens and 13 new .* 32"):
        asyncio.run(ask(engine, prompt_of(20), max_new_tokens=13))


@pytest.mark.parametrize(
    ("prompt_ids", "params"),
    [((), {}), ((5, 272), {}), ((-1,), {}), ((5,), {"max_new_tokens": 0}), ((5,), {"temperature": -1.0}),
     ((5,), {"top_p": 0.0}), ((5,), {"top_k": -1}), ((5,), {"min_p": 1.5}), ((5,), {"stop": ("",)})],
)  # fmt: skip
def test_nonsense_is_refused_and_harms_no_other_request(
    engine: EmbeddedEngine, ask: Any, prompt_ids: tuple[int, ...], params: dict[str, Any]
) -> None:
    with pytest.raises(EngineRefused):
        asyncio.run(ask(engine, prompt_ids, **params))
    assert asyncio.run(ask(engine, (5, 6), max_new_tokens=2)).token_ids


def test_a_window_wider_than_the_models_is_an_error(open_engine: Any) -> None:
    with pytest.raises(ValueError, match="max_context_tokens: 129"):
        open_engine(max_context_tokens=129)


def test_the_stop_token_is_the_last_id_and_no_part_of_the_text(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any
) -> None:
    async def run() -> list[Completion]:
        return await asyncio.gather(*(ask(engine, prompt_of(6), i, max_new_tokens=100) for i in range(40)))

    ended = [completion for completion in asyncio.run(run()) if completion.finish_reason == "stop"]
    assert ended
    for completion in ended:
        assert completion.token_ids.index(STOP_TOKEN) == len(completion.token_ids) - 1
        assert "<|im_end|>" not in completion.text


def test_a_stop_string_ends_with_its_last_token_and_the_text_before_it(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any
) -> None:
    async def run() -> None:
        whole = await ask(engine, prompt_of(6), max_new_tokens=40)
        stop = next(whole.text[i : i + 3] for i in range(12, 40) if "\ufffd" not in whole.text[i : i + 3])
        cut = await ask(engine, prompt_of(6), max_new_tokens=40, stop=("never there", stop))
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert len(cut.token_ids) < len(whole.token_ids)

    asyncio.run(run())


def test_a_request_id_in_flight_is_answered_once_for_all_who_ask(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any
) -> None:
    async def run() -> None:
        begun: list[str] = []
        first, second = await asyncio.gather(
            ask(engine, prompt_of(6), on_first_token=lambda: begun.append("first"), max_new_tokens=9),
            ask(engine, prompt_of(6), on_first_token=lambda: begun.append("second"), max_new_tokens=9),
        )
        assert first is second
        assert sorted(begun) == ["first", "second"]
        assert engine.stats().sampled_tokens == len(first.token_ids)

    asyncio.run(run())


def test_repeated_request_reports_its_first_token(engine: EmbeddedEngine, ask: Any, prompt_of: Any) -> None:
    stop_after(engine, num_tokens=3)

    async def run() -> None:
        first = asyncio.create_task(ask(engine, prompt_of(6), max_new_tokens=20, temperature=0.0))
        await paused(engine)
        told = asyncio.Event()
        again = asyncio.create_task(
            ask(engine, prompt_of(6), on_first_token=told.set, max_new_tokens=20, temperature=0.0)
        )
        async with asyncio.timeout(20):
            await told.wait()
        await engine.resume()
        assert await again is await first

    asyncio.run(run())


def test_a_cancelled_call_aborts_its_request_unless_another_waits(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any
) -> None:
    async def run() -> None:
        await engine.pause()
        alone = asyncio.create_task(ask(engine, prompt_of(6), "alone"))
        shared = [asyncio.create_task(ask(engine, prompt_of(6), "shared")) for _ in range(2)]
        await asyncio.sleep(0)
        alone.cancel()
        shared[0].cancel()
        await asyncio.gather(alone, shared[0], return_exceptions=True)
        await engine.pause()  # commands keep their order: the cancellations were handled
        assert engine.stats().waiting == 1
        await engine.resume()
        assert (await shared[1]).token_ids

    asyncio.run(run())
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


def test_an_aborted_request_returns_what_it_has(engine: EmbeddedEngine, ask: Any, prompt_of: Any) -> None:
    stop_after(engine, num_tokens=5)

    async def run() -> None:
        running = asyncio.create_task(ask(engine, prompt_of(6), "running", max_new_tokens=50, temperature=0.0))
        await paused(engine)
        waiting = asyncio.create_task(ask(engine, prompt_of(6), "waiting"))
        await asyncio.sleep(0)
        for request_id in ("running", "waiting", "unknown"):
            await engine.abort(request_id)
        assert (await running).finish_reason == (await waiting).finish_reason == "abort"
        assert len((await running).token_ids) == len((await running).logprobs) == (await running).versions[0].end == 5
        assert (await waiting).token_ids == () and (await waiting).oldest_version == 0

    asyncio.run(run())


def test_a_crash_fails_all_requests_with_its_cause(engine: EmbeddedEngine, ask: Any, prompt_of: Any) -> None:
    def crash() -> None:
        raise ZeroDivisionError("boom")

    engine._worker._batch.step = crash  # type: ignore[assignment, method-assign]

    async def run() -> None:
        results = await asyncio.gather(*(ask(engine, prompt_of(6), i) for i in range(3)), return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineDied) and "boom" in str(result)
            assert isinstance(result.__cause__, ZeroDivisionError)
        with pytest.raises(EngineDied):
            await engine.pause()

    asyncio.run(run())


def test_closing_fails_whoever_still_waits(engine: EmbeddedEngine, ask: Any, prompt_of: Any) -> None:
    async def run() -> None:
        await engine.pause()
        asked = asyncio.create_task(ask(engine, prompt_of(6)))
        await asyncio.sleep(0)
        engine.close()
        with pytest.raises(EngineDied, match="closed"):
            await asked

    asyncio.run(run())


def stop_after(engine: EmbeddedEngine, num_tokens: int) -> None:
    """Pause the engine from within, once, when it has sampled this much."""
    step = engine._worker._batch.step

    def step_and_pause() -> Any:
        changes = step()
        if engine.stats().sampled_tokens == num_tokens:
            engine._worker.pause("")
        return changes

    engine._worker._batch.step = step_and_pause  # type: ignore[method-assign]


async def paused(engine: EmbeddedEngine) -> None:
    async with asyncio.timeout(20):
        while not engine._worker._batch.paused:
            await asyncio.sleep(0.001)
