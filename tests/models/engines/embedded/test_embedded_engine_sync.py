"""Weights change during requests: what is sent, applied, returned in receipts, and the effect on kept requests."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grmpipe.models.checksum import checksum
from grmpipe.models.engines.embedded import fused_decoder
from grmpipe.models.engines.embedded.batch import RunningBatch
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.types import (
    Completion,
    GroupLink,
    InlineBytes,
    PromptScoring,
    VersionSpan,
    WeightBucket,
    WeightReceipt,
    WeightTensor,
)
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.transport_ends import open_transport
from grmpipe.models.weights.weight_stream import WeightStream


def buckets_of(path: str, dtype: str = "float32", bucket_bytes: int = 8192) -> list[WeightBucket]:
    stream, store = WeightStream(load_causal_lm(path), dtype, bucket_bytes), ObjectStore(dtype)
    return [store.post(index, stream.unshard_bucket(index)) for index in range(stream.num_buckets)]


async def push(engine: EmbeddedEngine, path: str, version: int) -> WeightReceipt:
    await engine.pause()
    await engine.begin_weights()
    for bucket in buckets_of(path):
        await engine.load_bucket(bucket)
    receipt = await engine.commit_weights(version)
    await engine.resume()
    return receipt


def one_tensor(name: str, shape: tuple[int, ...]) -> WeightBucket:
    data = np.ones(shape, dtype=np.float32).reshape(-1).view(np.uint8)
    tensor = WeightTensor(name=name, dtype="float32", shape=shape, checksum=checksum(data))
    return WeightBucket(tensors=(tensor,), payload=InlineBytes(data=(data,)))


def group_of_two() -> tuple[GroupLink, GroupLink]:
    """Links for a sender and one engine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    link = GroupLink(
        name=f"weights-{port}", backend="gloo", address="127.0.0.1", port=port, rank=0, world_size=2, timeout_s=60.0
    )
    return link, replace(link, rank=1)


def joined(*buckets: WeightBucket) -> WeightBucket:
    data: tuple[np.ndarray, ...] = ()
    for bucket in buckets:
        assert isinstance(bucket.payload, InlineBytes)
        data += bucket.payload.data
    tensors = tuple(tensor for bucket in buckets for tensor in bucket.tensors)
    return WeightBucket(tensors=tensors, payload=InlineBytes(data=data))


def test_a_sync_reaches_decoding_and_scoring(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any, next_version_path: str, next_plain: Any
) -> None:
    async def run() -> None:
        await ask(engine, prompt_of(30), "before")
        await push(engine, next_version_path, version=3)
        completion = await ask(engine, prompt_of(30), "after", max_new_tokens=30)
        expected = next_plain.logprobs(prompt_of(30), completion)
        assert completion.logprobs == pytest.approx(expected, abs=1e-3)
        assert completion.oldest_version == engine.version == 3
        scores = await engine.score((*prompt_of(30), *completion.token_ids))
        assert scores[29:] == pytest.approx(expected, abs=1e-3)

    asyncio.run(run())


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="weights are packed for AVX-512 alone")
def test_packed_copies_of_weights_are_made_anew_after_a_push(
    engine: EmbeddedEngine,
    ask: Any,
    prompt_of: Any,
    next_version_path: str,
    plain: Any,
    next_plain: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products: list[Tensor] = []
    multiply = fused_decoder.multiply_packed

    def noted(*of: Any) -> Tensor:
        products.append(multiply(*of))
        return products[-1]

    monkeypatch.setattr(fused_decoder, "LEAST_PACKED", 0)
    monkeypatch.setattr(fused_decoder, "multiply_packed", noted)

    async def answers(name: str, model: Any) -> None:
        made = await asyncio.gather(*(ask(engine, prompt_of(30), f"{name} {i}", max_new_tokens=8) for i in range(3)))
        assert products
        for completion in made:
            assert completion.logprobs == pytest.approx(model.logprobs(prompt_of(30), completion), abs=1e-3)
        products.clear()

    async def run() -> None:
        await answers("before", plain)
        await push(engine, next_version_path, version=1)
        await answers("after", next_plain)

    asyncio.run(run())


def test_the_receipt_echoes_the_hashes_of_what_was_sent(engine: EmbeddedEngine, next_version_path: str) -> None:
    sent = {tensor.name: tensor.checksum for bucket in buckets_of(next_version_path) for tensor in bucket.tensors}
    assert len(sent) > 10 and all(len(checksum) == 16 for checksum in sent.values())
    receipt = asyncio.run(push(engine, next_version_path, version=7))
    assert receipt == WeightReceipt(version=7, checksums=sent)

    async def commit_nothing() -> WeightReceipt:
        await engine.pause()
        return await engine.commit_weights(8)

    assert asyncio.run(commit_nothing()).checksums == {}


@pytest.mark.filterwarnings("error")
def test_read_only_and_bfloat16_bytes_are_taken(engine: EmbeddedEngine, prompt_of: Any, next_version_path: str) -> None:
    """Arrays in a shared store may be read-only."""

    async def run() -> None:
        await engine.pause()
        (bucket,) = buckets_of(next_version_path, "bfloat16", 1 << 20)
        assert isinstance(bucket.payload, InlineBytes)
        for data in bucket.payload.data:
            data.flags.writeable = False
        before = await engine.score(prompt_of(8))
        await engine.load_bucket(bucket)
        assert await engine.score(prompt_of(8)) != before

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "shape"), [("model.layers.9.mlp.up_proj.weight", (64, 32)), ("model.norm.weight", (33,))]
)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_of_its_bucket_is_loaded(
    engine: EmbeddedEngine, prompt_of: Any, name: str, shape: tuple[int, ...]
) -> None:
    async def run() -> None:
        await engine.pause()
        before = await engine.score(prompt_of(8))
        fitting = one_tensor("model.layers.0.input_layernorm.weight", (32,))
        with pytest.raises(ValueError, match=name):
            await engine.load_bucket(joined(fitting, one_tensor(name, shape)))
        assert await engine.score(prompt_of(8)) == before

    asyncio.run(run())


@pytest.mark.parametrize("transport", ["shared_memory", "disk", "gloo"])
def test_weights_that_come_another_way_are_the_same(
    engine: EmbeddedEngine, prompt_of: Any, next_version_path: str, next_plain: Any, transport: str, tmp_path: Path
) -> None:
    stream = WeightStream(load_causal_lm(next_version_path), "float32", 8192)
    sender = open_transport(transport, "float32", torch.device("cpu"), str(tmp_path))
    first, second = group_of_two() if transport == "gloo" else (None, None)

    async def run() -> None:
        await engine.pause()
        await asyncio.gather(engine.begin_weights(second), asyncio.to_thread(sender.connect, first))
        sent: dict[str, str] = {}
        for index in range(stream.num_buckets):
            bucket = sender.post(index, stream.unshard_bucket(index))
            await asyncio.gather(engine.load_bucket(bucket), asyncio.to_thread(sender.deliver, index))
            sent |= {tensor.name: tensor.checksum for tensor in bucket.tensors}
        assert await engine.commit_weights(1) == WeightReceipt(version=1, checksums=sent)
        await engine.resume()
        ids = prompt_of(20)
        logprobs = next_plain.logits(ids)[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert await engine.score(ids) == pytest.approx(logprobs.tolist(), abs=1e-3)

    asyncio.run(run())
    sender.close()


def test_an_engine_that_refuses_a_broadcast_lets_the_sender_go_at_once_and_joins_again(
    engine: EmbeddedEngine, next_version_path: str
) -> None:
    unfit = torch.nn.ParameterDict({"large": torch.nn.Parameter(torch.zeros(1 << 22))})
    fit = WeightStream(load_causal_lm(next_version_path), "float32", 1 << 20)
    sender = open_transport("gloo", "float32", torch.device("cpu"), "")

    async def begin() -> None:
        first, second = group_of_two()
        await asyncio.gather(engine.begin_weights(second), asyncio.to_thread(sender.connect, first))

    async def run() -> None:
        await engine.pause()
        await begin()
        refused = sender.post(0, WeightStream(unfit, "float32", 1 << 30).unshard_bucket(0))
        load = asyncio.create_task(engine.load_bucket(refused))
        async with asyncio.timeout(10):  # the group's own timeout is a minute
            with pytest.raises(ConnectionError, match="'large'"):
                await asyncio.to_thread(sender.deliver, 0)
        with pytest.raises(ValueError, match="has no tensor 'large'"):
            await load
        await begin()
        bucket = sender.post(0, fit.unshard_bucket(0))
        await asyncio.gather(engine.load_bucket(bucket), asyncio.to_thread(sender.deliver, 0))
        assert (await engine.commit_weights(1)).checksums == {t.name: t.checksum for t in bucket.tensors}

    asyncio.run(run())
    sender.close()


def test_a_tied_head_has_both_its_names(engine: EmbeddedEngine, prompt_of: Any) -> None:
    async def run() -> None:
        await engine.pause()
        scores = []
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            await engine.load_bucket(one_tensor(name, (272, 32)))
            scores.append(await engine.score(prompt_of(8)))
        assert scores[0] == scores[1]
        assert scores[0] == pytest.approx([-np.log(272)] * 7)  # all embeddings equal: no token is likelier

    asyncio.run(run())


def test_an_engine_that_runs_takes_no_weights(engine: EmbeddedEngine) -> None:
    with pytest.raises(RuntimeError, match="paused"):
        asyncio.run(engine.load_bucket(one_tensor("model.norm.weight", (32,))))
    with pytest.raises(RuntimeError, match="paused"):
        asyncio.run(engine.begin_weights())


def test_tensors_of_an_unfinished_push_are_in_no_receipt(engine: EmbeddedEngine) -> None:
    async def run() -> WeightReceipt:
        await engine.pause()
        await engine.begin_weights()
        await engine.load_bucket(one_tensor("model.norm.weight", (32,)))
        await engine.begin_weights()
        await engine.load_bucket(one_tensor("model.layers.0.input_layernorm.weight", (32,)))
        return await engine.commit_weights(1)

    assert asyncio.run(run()).checksums.keys() == {"model.layers.0.input_layernorm.weight"}


@pytest.mark.parametrize("recompute", [True, False])
def test_kept_requests_continue_under_the_new_version(
    open_engine: Any, ask: Any, prompt_of: Any, plain: Any, next_plain: Any, next_version_path: str, recompute: bool
) -> None:
    """Five tokens with version 0, the rest with version 1; recomputed keys and values are all of version 1."""
    engine = open_engine(recompute_kv_on_sync=recompute, prefill_tokens=60)
    prompts = [prompt_of(20), prompt_of(35), prompt_of(35), prompt_of(50)]
    pause_after(engine, num_tokens=5 * len(prompts))

    async def run() -> list[Completion]:
        asked = [
            asyncio.create_task(ask(engine, ids, i, max_new_tokens=12, temperature=0.0))
            for i, ids in enumerate(prompts)
        ]
        await paused(engine)
        await push(engine, next_version_path, version=1)
        await push(engine, next_version_path, version=1)  # the same again begins no new span
        return await asyncio.gather(*asked)

    for prompt_ids, completion in zip(prompts, asyncio.run(run()), strict=True):
        cut = completion.versions[0].end
        assert completion.versions == (
            VersionSpan(model="policy", version=0, start=0, end=cut),
            VersionSpan(model="policy", version=1, start=cut, end=12),
        )
        assert completion.logprobs[:cut] == pytest.approx(plain.logprobs(prompt_ids, completion)[:cut], abs=1e-3)
        under_new = pytest.approx(next_plain.logprobs(prompt_ids, completion)[cut:], abs=1e-3)
        assert (completion.logprobs[cut:] == under_new) == recompute


def test_a_prompt_that_is_not_complete_at_a_push_begins_again_under_the_new_version(
    open_engine: Any, ask: Any, prompt_of: Any, next_plain: Any, next_version_path: str
) -> None:
    engine = open_engine(prefill_tokens=30)
    batch, begun = engine._worker._batch, 0

    def step_and_pause() -> Any:
        nonlocal begun
        changes, begun = RunningBatch.step(batch), begun + 1
        (engine._worker.pause if begun == 2 else engine._worker.resume)("")
        return changes

    batch.step = step_and_pause

    async def run() -> tuple[Completion, Completion]:
        asked = asyncio.create_task(ask(engine, prompt_of(100), "r", max_new_tokens=10, temperature=0.0))
        scoring = PromptScoring(start=10)
        scored = asyncio.create_task(ask(engine, prompt_of(90), "scored", max_new_tokens=1, scoring=scoring))
        await paused(engine)
        assert engine.stats().prefilled_tokens == 60 and engine.stats().running == 1
        await push(engine, next_version_path, version=1)
        return await asked, await scored

    completion, scored = asyncio.run(run())
    assert [span.version for span in completion.versions + scored.versions] == [1, 1]
    assert completion.logprobs == pytest.approx(next_plain.logprobs(prompt_of(100), completion), abs=1e-3)
    logprobs_NV = next_plain.logits(prompt_of(90))[9:-1].log_softmax(-1)
    expected_N = logprobs_NV.gather(-1, torch.tensor(prompt_of(90)[10:])[:, None])[:, 0]
    assert scored.scores is not None and scored.scores.logprobs_N == pytest.approx(expected_N.numpy(), abs=1e-3)


def test_a_newcomer_never_takes_a_prompt_cached_under_older_weights(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any, next_plain: Any, next_version_path: str
) -> None:
    pause_after(engine, num_tokens=5)

    async def run() -> None:
        kept = asyncio.create_task(ask(engine, prompt_of(40), 0, max_new_tokens=60, temperature=0.0))
        await paused(engine)
        newcomers = [asyncio.create_task(ask(engine, prompt_of(40), i, max_new_tokens=10)) for i in (1, 2)]
        await asyncio.sleep(0)
        await push(engine, next_version_path, version=1)
        for completion in await asyncio.gather(*newcomers):
            assert completion.logprobs == pytest.approx(next_plain.logprobs(prompt_of(40), completion), abs=1e-3)
        await kept

    asyncio.run(run())
    assert engine.stats().prefilled_tokens == 2 * 39


def test_a_push_drops_parked_rows_and_the_next_turn_has_the_new_weights_only(
    engine: EmbeddedEngine, ask: Any, prompt_of: Any, next_version_path: str, next_plain: Any
) -> None:
    async def run() -> None:
        first = await ask(engine, prompt_of(40), "g/t0", trajectory_id="g")
        assert engine.stats().parked == 1
        await push(engine, next_version_path, version=1)
        assert engine.stats().parked == 0
        ids = (*prompt_of(40), *first.token_ids, 7, 8)
        second = await ask(engine, ids, "g/t1", trajectory_id="g")
        assert second.logprobs == pytest.approx(next_plain.logprobs(ids, second), abs=1e-3)

    asyncio.run(run())


@pytest.mark.parametrize("recompute", [True, False])
def test_a_request_that_spans_a_push_is_parked_only_if_it_was_prefilled_again(
    open_engine: Any, ask: Any, prompt_of: Any, next_version_path: str, recompute: bool
) -> None:
    engine = open_engine(recompute_kv_on_sync=recompute)
    pause_after(engine, num_tokens=4)

    async def run() -> None:
        asked = asyncio.create_task(ask(engine, prompt_of(20), trajectory_id="g", max_new_tokens=9, temperature=0.0))
        await paused(engine)
        await push(engine, next_version_path, version=1)
        assert len((await asked).versions) == 2

    asyncio.run(run())
    assert engine.stats().parked == recompute


def pause_after(engine: EmbeddedEngine, num_tokens: int) -> None:
    """Pause the engine from within, once, when it has sampled at least this much."""
    step, done = engine._worker._batch.step, False

    def step_and_pause() -> Any:
        nonlocal done
        changes = step()
        if not done and engine.stats().sampled_tokens >= num_tokens:
            done = True
            engine._worker.pause("")
        return changes

    engine._worker._batch.step = step_and_pause  # type: ignore[method-assign]


async def paused(engine: EmbeddedEngine) -> None:
    async with asyncio.timeout(20):
        while not engine._worker._batch.paused:
            await asyncio.sleep(0.001)
