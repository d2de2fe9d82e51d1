"""New weights during requests: what is sent, applied and returned in the receipt, and every engine's reaction to a
failed push.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grmpipe.models.checksum import checksum
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.types import (
    Broadcast,
    Completion,
    GroupLink,
    InlineBytes,
    ModelFiles,
    VersionSpan,
    WeightBucket,
    WeightReceipt,
    WeightTensor,
)
from grmpipe.models.weights.broadcast import GlooBroadcasts
from grmpipe.models.weights.checksums import tensor_checksums
from grmpipe.models.weights.transport_ends import open_transport
from grmpipe.models.weights.weight_stream import WeightStream

NUM_TENSORS = 35  # of the tiny model; its head is tied


def one_tensor(name: str, shape: tuple[int, ...]) -> WeightBucket:
    data = np.ones(shape, dtype=np.float32).reshape(-1).view(np.uint8)
    tensor = WeightTensor(name=name, dtype="float32", shape=shape, checksum=checksum(data))
    return WeightBucket(tensors=(tensor,), payload=InlineBytes(data=(data,)))


def scored(plain: Any, ids: tuple[int, ...]) -> list[float]:
    logprobs_TV = plain.logits(ids)[:-1].log_softmax(-1)
    return [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, ids[1:], strict=True)]


def test_a_push_reaches_sampling_and_scoring_and_its_receipt_echoes_what_was_sent(
    engine: Any,
    ask: Any,
    run: Any,
    push: Any,
    prompt_of: Any,
    plain: Any,
    next_plain: Any,
    next_version_path: str,
    tolerance: float,
) -> None:
    async def swap() -> tuple[WeightReceipt, Completion, Any, Any]:
        before = await engine.score(prompt_of(40))
        receipt = await push(engine, next_version_path, version=3)
        completion = await ask(engine, prompt_of(40), "after", max_new_tokens=30)
        return receipt, completion, before, await engine.score(prompt_of(40))

    receipt, completion, before, after = run(swap())
    sent = dict(load_causal_lm(next_version_path).named_parameters())
    expected = dict(zip(sent, tensor_checksums([tensor.detach() for tensor in sent.values()]), strict=True))
    assert receipt == WeightReceipt(version=3, checksums=expected) and len(expected) == NUM_TENSORS
    assert engine.version == completion.oldest_version == 3
    assert before == pytest.approx(scored(plain, prompt_of(40)), abs=tolerance)
    assert after == pytest.approx(scored(next_plain, prompt_of(40)), abs=tolerance)
    assert completion.logprobs == pytest.approx(next_plain.logprobs(prompt_of(40), completion), abs=tolerance)


@pytest.mark.parametrize("transport", ["object_store", "shared_memory", "disk", "gloo"])
def test_weights_arrive_by_every_way_that_a_cpu_has(
    engine: Any, kind: Any, run: Any, prompt_of: Any, next_plain: Any, next_version_path: str, tmp_path: Path,
    transport: str, tolerance: float
) -> None:  # fmt: skip
    stream = WeightStream(load_causal_lm(next_version_path), "float32", bucket_bytes=1 << 15)
    sender = open_transport(transport, "float32", torch.device("cpu"), str(tmp_path))
    link = link_of("transports") if transport == "gloo" else None
    sent: dict[str, str] = {}

    async def send() -> WeightReceipt:
        await engine.pause()
        await asyncio.gather(engine.begin_weights(link), asyncio.to_thread(sender.connect, as_sender(link)))
        for index in range(stream.num_buckets):
            bucket = sender.post(index, stream.unshard_bucket(index))
            sent.update({tensor.name: tensor.checksum for tensor in bucket.tensors})
            await asyncio.gather(engine.load_bucket(bucket), asyncio.to_thread(sender.deliver, index))
        receipt: WeightReceipt = await engine.commit_weights(5)
        await engine.resume()
        return receipt

    try:
        checksums = run(send()).checksums
        assert checksums == (sent if transport != "gloo" or kind.hashes_broadcasts else dict.fromkeys(sent, ""))
        assert run(engine.score(prompt_of(40))) == pytest.approx(scored(next_plain, prompt_of(40)), abs=tolerance)
    finally:
        sender.close()


def test_a_model_is_read_from_its_own_files_and_pushes_and_files_take_turns(
    engine: Any, kind: Any, ask: Any, run: Any, push: Any, prompt_of: Any, plain: Any, next_plain: Any,
    next_version_path: str, model_path: str, tolerance: float
) -> None:  # fmt: skip
    async def read(path: str, version: int) -> WeightReceipt:
        await engine.pause()
        await engine.begin_weights()
        try:
            await engine.load_bucket(WeightBucket(tensors=(), payload=ModelFiles(path=path)))
            return await engine.commit_weights(version)
        finally:
            await engine.resume()

    async def by_turns() -> list[Any]:
        seen = [await read(next_version_path, 7), await engine.score(prompt_of(40))]
        seen += [await push(engine, model_path, version=8), await engine.score(prompt_of(40))]
        seen += [await read(next_version_path, 9), await ask(engine, prompt_of(40), "after", max_new_tokens=20)]
        return seen

    if not kind.reads_models:
        with pytest.raises(ValueError, match="read model files themselves"):
            run(read(next_version_path, 7))
        return
    receipt, by_files, pushed, by_push, _, completion = run(by_turns())
    assert receipt == WeightReceipt(version=7, checksums={}), "a loader of files hashes nothing"
    assert by_files == pytest.approx(scored(next_plain, prompt_of(40)), abs=tolerance)
    assert len(pushed.checksums) == NUM_TENSORS
    assert by_push == pytest.approx(scored(plain, prompt_of(40)), abs=tolerance)
    assert completion.versions == (VersionSpan(model="policy", version=9, start=0, end=20),)
    assert completion.logprobs == pytest.approx(next_plain.logprobs(prompt_of(40), completion), abs=tolerance)


def test_bfloat16_weights_are_taken_by_a_float32_engine(
    engine: Any, run: Any, prompt_of: Any, next_plain: Any, next_version_path: str
) -> None:
    stream = WeightStream(load_causal_lm(next_version_path), "bfloat16", bucket_bytes=1 << 30)
    sender = open_transport("object_store", "bfloat16", torch.device("cpu"), "")

    async def send() -> Any:
        await engine.pause()
        await engine.begin_weights()
        await engine.load_bucket(sender.post(0, stream.unshard_bucket(0)))
        await engine.commit_weights(1)
        await engine.resume()
        return await engine.score(prompt_of(40))

    apart = np.abs(np.subtract(run(send()), scored(next_plain, prompt_of(40))))
    assert 1e-4 < apart.max() < 0.5


def test_kept_requests_continue_under_the_new_version(
    either_engine: Any, recompute: bool, ask: Any, run: Any, push: Any, prompt_of: Any, plain: Any,
    next_plain: Any, next_version_path: str, begun: Any, tolerance: float
) -> None:  # fmt: skip
    """Recomputed keys and values are all of the new version; kept ones are not, which the log-probs show."""
    prompts = [prompt_of(20), prompt_of(35), prompt_of(35), prompt_of(33)]

    async def swap_in_flight() -> list[Completion]:
        asked = [
            asyncio.create_task(ask(either_engine, ids, i, max_new_tokens=90, temperature=0.0, on_first_token=begun))
            for i, ids in enumerate(prompts)
        ]
        while begun.num_calls < len(prompts):
            await asyncio.sleep(0.001)
        await push(either_engine, next_version_path, version=1)
        return await asyncio.gather(*asked)

    completions = run(swap_in_flight())
    crossed = [completion for completion in completions if len(completion.versions) == 2]
    assert crossed, "no request was under way at the swap"
    for prompt_ids, completion in zip(prompts, completions, strict=True):
        if completion not in crossed:
            continue
        cut, end = completion.versions[0].end, len(completion.token_ids)
        assert completion.versions == (
            VersionSpan(model="policy", version=0, start=0, end=cut),
            VersionSpan(model="policy", version=1, start=cut, end=end),
        )
        assert completion.logprobs[:cut] == pytest.approx(plain.logprobs(prompt_ids, completion)[:cut], abs=tolerance)
        under_new = pytest.approx(next_plain.logprobs(prompt_ids, completion)[cut:], abs=tolerance)
        assert (completion.logprobs[cut:] == under_new) == recompute


def test_nothing_is_sampled_while_paused_and_newcomers_wait(
    engine: Any, ask: Any, run: Any, prompt_of: Any, begun: Any
) -> None:
    async def paused() -> tuple[int, Completion, Completion]:
        kept = asyncio.create_task(ask(engine, prompt_of(20), "kept", max_new_tokens=100, on_first_token=begun))
        await begun.wait()
        await engine.pause()
        newcomer = asyncio.create_task(ask(engine, prompt_of(22), "new", max_new_tokens=4, on_first_token=begun))
        await asyncio.sleep(0.2)
        calls = begun.num_calls
        assert not kept.done() and not newcomer.done()
        await engine.resume()
        return calls, await kept, await newcomer

    calls, kept, newcomer = run(paused())
    assert calls == 1 and len(newcomer.token_ids) == 4
    assert kept.finish_reason in ("length", "stop")


def test_pausing_twice_is_pausing_and_a_request_can_be_aborted_meanwhile(
    engine: Any, ask: Any, run: Any, prompt_of: Any, begun: Any
) -> None:
    async def paused() -> Completion:
        kept = asyncio.create_task(ask(engine, prompt_of(20), "kept", max_new_tokens=100, on_first_token=begun))
        await begun.wait()
        await engine.pause()
        await engine.pause()
        await engine.abort("kept")
        completion: Completion = await asyncio.wait_for(kept, 10)
        await engine.resume()
        return completion

    completion = run(paused())
    assert completion.finish_reason == "abort"
    assert completion.versions[-1].end == len(completion.token_ids) > 0


def test_no_newcomer_takes_a_prompt_cached_under_older_weights(
    either_engine: Any, ask: Any, run: Any, push: Any, prompt_of: Any, next_plain: Any,
    next_version_path: str, begun: Any, tolerance: float
) -> None:  # fmt: skip
    """Neither a request that was waiting for a row when the weights came, nor one of the pause, nor a later one."""
    prompt = prompt_of(70, seed=8)

    async def full_and_paused() -> tuple[list[asyncio.Task[Completion]], asyncio.Task[Completion]]:
        """All rows taken and another request waiting. Tries again if the engine was done too early."""
        for attempt in range(20):
            again = f".{attempt}" if attempt else ""  # the first names are those of a recorded server
            first_tokens = begun.num_calls
            kept = [
                asyncio.create_task(
                    ask(either_engine, prompt, f"k{i}{again}", max_new_tokens=58, temperature=0.0,
                        on_first_token=begun)
                )
                for i in range(4)
            ]  # fmt: skip
            while begun.num_calls < first_tokens + 4:
                await asyncio.sleep(0.001)
            waiting = asyncio.create_task(ask(either_engine, prompt, f"waiting{again}", max_new_tokens=10))
            await asyncio.sleep(0.002)
            await either_engine.pause()
            await asyncio.sleep(0.01)
            if not any(task.done() for task in kept):
                return kept, waiting
            await either_engine.resume()
            await asyncio.gather(*kept, waiting)
        raise AssertionError("the pause came too late, twenty times")

    async def swap() -> list[Completion]:
        kept, waiting = await full_and_paused()
        meanwhile = asyncio.create_task(ask(either_engine, prompt, "meanwhile", max_new_tokens=10))
        await asyncio.sleep(0.01)
        await push(either_engine, next_version_path, version=1)
        later = await ask(either_engine, prompt, "later", max_new_tokens=10)
        await asyncio.gather(*kept)
        return [await waiting, await meanwhile, later]

    for completion in run(swap()):
        assert [span.version for span in completion.versions] == [1]
        assert completion.logprobs == pytest.approx(next_plain.logprobs(prompt, completion), abs=tolerance)


@pytest.mark.parametrize(
    ("name", "shape"), [("model.layers.9.mlp.up_proj.weight", (64, 32)), ("model.norm.weight", (33,))]
)
def test_a_tensor_that_does_not_fit_is_named_and_the_engine_lives_on(
    engine: Any, ask: Any, run: Any, push: Any, prompt_of: Any, plain: Any, next_plain: Any, next_version_path: str,
    name: str, shape: tuple[int, ...], tolerance: float
) -> None:  # fmt: skip
    async def refuse() -> tuple[Any, Any]:
        await engine.pause()
        await engine.begin_weights()
        with pytest.raises(ValueError, match=name):
            await engine.load_bucket(one_tensor(name, shape))
        await engine.resume()
        before = await engine.score(prompt_of(40))
        await push(engine, next_version_path, version=2)
        return before, await engine.score(prompt_of(40))

    before, after = run(refuse())
    assert before == pytest.approx(scored(plain, prompt_of(40)), abs=tolerance)
    assert after == pytest.approx(scored(next_plain, prompt_of(40)), abs=tolerance)


def test_a_push_that_broke_off_leaves_nothing_for_the_next_one(
    engine: Any,
    all_buckets: Any,
    run: Any,
    push: Any,
    prompt_of: Any,
    next_plain: Any,
    next_version_path: str,
    tolerance: float,
) -> None:
    """It ended within a layer whose parts (q, k, v) are one tensor of the engine."""
    part = all_buckets(
        next_version_path, lambda name: name.endswith(("0.self_attn.q_proj.weight", "embed_tokens.weight"))
    )

    async def broken_then_good() -> tuple[WeightReceipt, Any]:
        await engine.pause()
        await engine.begin_weights()
        for bucket in part:
            await engine.load_bucket(bucket)
        receipt = await push(engine, next_version_path, version=2)
        return receipt, await engine.score(prompt_of(40))

    receipt, after = run(broken_then_good())
    assert len(receipt.checksums) == NUM_TENSORS
    assert after == pytest.approx(scored(next_plain, prompt_of(40)), abs=tolerance)


def test_engine_continues_after_a_push_that_broke_off(
    engine: Any,
    all_buckets: Any,
    run: Any,
    push: Any,
    prompt_of: Any,
    ask: Any,
    model_path: str,
    next_version_path: str,
) -> None:
    (part,) = all_buckets(next_version_path, lambda name: name.endswith("0.self_attn.q_proj.weight"))

    async def broken() -> Completion:
        await engine.pause()
        await engine.begin_weights()
        await engine.load_bucket(part)
        await engine.resume()
        completion: Completion = await ask(engine, prompt_of(20), max_new_tokens=5)
        await push(engine, model_path, version=0)
        return completion

    assert len(run(broken()).token_ids) == 5


@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.1.mlp.down_proj.weight",),
        ("model.embed_tokens.weight", "model.layers.2.self_attn.k_norm.weight"),
    ],
)
def test_tensors_that_were_not_sent_stay_as_they_are(
    engine: Any, run: Any, push: Any, prompt_of: Any, model_path: str, next_version_path: str, plain: Any,
    names: tuple[str, ...], tolerance: float
) -> None:  # fmt: skip
    mixed, other = load_causal_lm(model_path), dict(load_causal_lm(next_version_path).named_parameters())
    with torch.no_grad():
        for name in names:
            mixed.get_parameter(name).copy_(other[name])
        ids = prompt_of(40)
        logits_TV = mixed(torch.tensor([ids])).logits[0]
    logprobs_TV = logits_TV[:-1].log_softmax(-1)
    expected = [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, ids[1:], strict=True)]

    async def push_some() -> tuple[WeightReceipt, Any]:
        receipt = await push(engine, next_version_path, version=4, names=names.__contains__)
        return receipt, await engine.score(ids)

    receipt, got = run(push_some())
    assert set(receipt.checksums) == set(names)
    assert got == pytest.approx(expected, abs=tolerance)
    assert np.abs(np.subtract(got, scored(plain, ids))).max() > 1e-3


def test_a_tied_head_has_both_its_names(
    engine: Any, run: Any, prompt_of: Any, push: Any, next_version_path: str, tolerance: float
) -> None:
    async def send(name: str) -> Any:
        await engine.pause()
        await engine.begin_weights()
        await engine.load_bucket(one_tensor(name, (272, 32)))
        await engine.commit_weights(6)
        await engine.resume()
        return await engine.score(prompt_of(8))

    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert run(send(name)) == pytest.approx([-np.log(272)] * 7, abs=tolerance)  # all equal: no token is likelier
        run(push(engine, next_version_path, version=7))


def test_a_commit_of_nothing_is_a_new_name_for_the_same_weights(
    engine: Any, run: Any, ask: Any, prompt_of: Any, plain: Any, tolerance: float
) -> None:
    async def rename() -> tuple[WeightReceipt, Completion]:
        await engine.pause()
        await engine.begin_weights()
        receipt = await engine.commit_weights(9)
        await engine.resume()
        return receipt, await ask(engine, prompt_of(20))

    receipt, completion = run(rename())
    assert receipt == WeightReceipt(version=9, checksums={})
    assert completion.oldest_version == 9
    assert completion.logprobs == pytest.approx(plain.logprobs(prompt_of(20), completion), abs=tolerance)


def test_an_engine_that_runs_takes_no_weights(engine: Any, run: Any) -> None:
    with pytest.raises(RuntimeError, match="paused"):
        run(engine.begin_weights())


def test_a_sender_that_hangs_costs_the_links_timeout_and_no_restart(
    engine: Any,
    all_buckets: Any,
    run: Any,
    push: Any,
    prompt_of: Any,
    next_plain: Any,
    next_version_path: str,
    tolerance: float,
) -> None:
    """It joined the group, announced a bucket and sent nothing."""
    sender = GlooBroadcasts("float32", torch.device("cpu"))
    link = link_of("hanging", timeout_s=2.0)
    (bucket, *_) = all_buckets(next_version_path)

    async def hang() -> Any:
        await engine.pause()
        await asyncio.gather(engine.begin_weights(link), asyncio.to_thread(sender.connect, as_sender(link)))
        with pytest.raises(ConnectionError, match="embed_tokens"):
            await asyncio.wait_for(engine.load_bucket(WeightBucket(tensors=bucket.tensors, payload=Broadcast())), 15)
        await push(engine, next_version_path, version=2)
        return await engine.score(prompt_of(40))

    try:
        assert run(hang()) == pytest.approx(scored(next_plain, prompt_of(40)), abs=tolerance)
    finally:
        sender.close()


def as_sender(link: GroupLink | None) -> GroupLink | None:
    return replace(link, rank=0) if link is not None else None


def link_of(name: str, timeout_s: float = 20.0) -> GroupLink:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return GroupLink(
        name=f"{name}-{port}", backend="gloo", address="127.0.0.1", port=port, rank=1, world_size=2, timeout_s=timeout_s
    )
