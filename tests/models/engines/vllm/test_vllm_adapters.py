"""Adapters that vLLM applies itself, on a CPU: the same log-probs as the learner's model, push after push."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.engines.installed import vllm_missing
from models.engines.vllm.vllm_engine import VllmEngine
from models.lm.causal_lm import load_causal_lm
from models.lm.lora import adapters, add_adapters, outgoing
from models.settings import LoraConfig, VllmConfig
from models.types import ModelFiles, VersionSpan, WeightBucket, WeightReceipt
from models.weights.object_store import ObjectStore
from models.weights.weight_stream import WeightStream

pytestmark = [
    pytest.mark.vllm, pytest.mark.long, pytest.mark.skipif(vllm_missing() is not None, reason=str(vllm_missing())),
]  # fmt: skip
LORA = LoraConfig(rank=4, alpha=8.0, sync="adapters")
TENSORS = 3 * 7 * 2  # layers, linear layers of each, A and B


class Trained:
    """The learner's model, with adapters as after some steps."""

    def __init__(self, path: str, seed: int) -> None:
        self.model = add_adapters(load_causal_lm(path), LORA, "float32")
        dice = torch.Generator().manual_seed(seed)
        for _, low_rank in adapters(self.model):
            for matrix in (low_rank.a_RI, low_rank.b_OR):
                matrix.data = 0.2 * torch.randn(matrix.shape, generator=dice)

    def buckets(self) -> list[WeightBucket]:
        stream = WeightStream(self.model, "float32", 1 << 12, outgoing(self.model, LORA, "float32"))
        store = ObjectStore("float32")
        return [store.post(index, stream.unsharded(index)) for index in range(stream.num_buckets)]

    def score(self, ids: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            logprobs_TV = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, ids[1:], strict=True)]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(model_path: str, runner: asyncio.Runner) -> Iterator[VllmEngine]:
    engine = VllmEngine(model_path, "policy", VllmConfig(max_batch_rows=4, kv_cache_mb=16), lora=LORA)
    yield engine
    engine.close()


@pytest.fixture
def run(runner: asyncio.Runner) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return lambda work: runner.run(asyncio.wait_for(work, 60))


async def push(engine: VllmEngine, buckets: list[WeightBucket], version: int) -> WeightReceipt:
    await engine.pause()
    await engine.begin_weights()
    for bucket in buckets:
        await engine.load_bucket(bucket)
    receipt = await engine.commit_weights(version)
    await engine.resume()
    return receipt


def test_log_probs_are_those_of_the_base_then_of_each_pushed_adapter(
    engine: VllmEngine, run: Any, ask: Any, prompt_of: Any, plain: Any, model_path: str
) -> None:
    ids = prompt_of(40)
    base = plain.logits(ids)[:-1].log_softmax(-1)
    assert run(engine.score(ids)) == pytest.approx(
        [float(logprobs_V[token]) for logprobs_V, token in zip(base, ids[1:], strict=True)], abs=1e-4
    )
    for version in (1, 2):
        trained = Trained(model_path, version)
        sent = trained.buckets()
        receipt = run(push(engine, sent, version))
        assert receipt.checksums == {tensor.name: tensor.checksum for bucket in sent for tensor in bucket.tensors}
        assert (len(receipt.checksums), receipt.unapplied) == (TENSORS, ())
        assert run(engine.score(ids)) == pytest.approx(trained.score(ids), abs=1e-4)
        completion = run(ask(engine, ids, f"after {version}", max_new_tokens=20))
        whole = trained.score((*ids, *completion.token_ids))
        assert completion.logprobs == pytest.approx(whole[len(ids) - 1 :], abs=1e-4)
        assert completion.oldest_version == version


def test_a_kept_request_goes_on_with_the_new_adapter(
    engine: VllmEngine, run: Any, ask: Any, prompt_of: Any, model_path: str
) -> None:
    ids, trained = prompt_of(20), Trained(model_path, 5)

    async def push_meanwhile() -> Any:
        begun = asyncio.Event()
        engine._config = replace(engine._config, recompute_kv_on_sync=True)
        asked = asyncio.create_task(ask(engine, ids, "kept", max_new_tokens=60, on_first_token=begun.set))
        await begun.wait()
        await push(engine, trained.buckets(), 7)
        return await asked

    completion = run(push_meanwhile())
    before, after = completion.versions
    assert (before.start, after.version, after.end) == (0, 7, completion.num_tokens)
    whole = trained.score((*ids, *completion.token_ids))
    assert completion.logprobs[after.start :] == pytest.approx(whole[len(ids) - 1 + after.start :], abs=1e-4)
    assert isinstance(before, VersionSpan) and before.end == after.start > 0


def test_a_push_of_nothing_and_one_that_broke_off_leave_the_adapter(
    engine: VllmEngine, run: Any, prompt_of: Any, model_path: str
) -> None:
    ids, trained, other = prompt_of(30), Trained(model_path, 3), Trained(model_path, 4)

    async def break_off() -> None:
        await engine.pause()
        await engine.begin_weights()
        await engine.load_bucket(other.buckets()[0])
        await engine.resume()

    run(push(engine, trained.buckets(), 3))
    run(break_off())
    assert run(engine.score(ids)) == pytest.approx(trained.score(ids), abs=1e-4)
    assert run(push(engine, [], 4)).checksums == {}
    assert run(engine.score(ids)) == pytest.approx(trained.score(ids), abs=1e-4)


def test_only_some_buckets_change_only_their_layers(
    engine: VllmEngine, run: Any, prompt_of: Any, model_path: str
) -> None:
    ids, one, other = prompt_of(30), Trained(model_path, 3), Trained(model_path, 4)
    run(push(engine, one.buckets(), 3))
    run(push(engine, other.buckets()[:1], 4))
    sent = {tensor.name for tensor in other.buckets()[0].tensors}
    parameters, newer = dict(one.model.named_parameters()), dict(other.model.named_parameters())
    for name in sent:
        parameters[name].data = newer[name].data
    assert 0 < len(sent) < TENSORS
    assert run(engine.score(ids)) == pytest.approx(one.score(ids), abs=1e-4)


def test_what_is_no_adapter_of_this_model_is_refused_by_name(
    engine: VllmEngine, run: Any, prompt_of: Any, model_path: str
) -> None:
    trained = Trained(model_path, 3)
    run(push(engine, trained.buckets(), 3))
    first = trained.buckets()[0]
    q_a = first.tensors[0]
    strangers = {
        "layers.9": [replace(q_a, name=q_a.name.replace("layers.0", "layers.9")), *first.tensors[1:]],
        "arrived as": [replace(q_a, shape=q_a.shape[::-1]), *first.tensors[1:]],
        "is no adapter": [replace(q_a, name="model.norm.weight"), *first.tensors[1:]],
    }

    async def send(bucket: WeightBucket) -> None:
        await engine.pause()
        await engine.begin_weights()
        try:
            await engine.load_bucket(bucket)
        finally:
            await engine.resume()

    for message, tensors in strangers.items():
        with pytest.raises(ValueError, match=message):
            run(send(replace(first, tensors=tuple(tensors))))
    with pytest.raises(ValueError, match=r"lora\.sync=merged"):
        run(send(WeightBucket(tensors=(), payload=ModelFiles(path=model_path))))
    assert run(engine.score(prompt_of(30))) == pytest.approx(trained.score(prompt_of(30)), abs=1e-4)
