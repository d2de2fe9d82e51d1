"""Adapters that vLLM applies itself, on a CPU: the same log-probs as the learner's model, push after push."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grmpipe.models.adapter_view import AdapterView
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm import options as vllm_options
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.checkpoint_names import CheckpointNames
from grmpipe.models.lm.lora import ADAPTER, adapters, add_adapters, list_outgoing, save_adapters
from grmpipe.models.settings import LoraConfig, VllmConfig
from grmpipe.models.types import ModelFiles, VersionSpan, WeightBucket, WeightReceipt
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.weight_stream import WeightStream

pytestmark = [pytest.mark.vllm, pytest.mark.long]
LORA = LoraConfig(rank=4, alpha=8.0, sync="adapters")
TENSORS = 3 * 7 * 2  # layers, linear layers of each, A and B


class Trained:
    """The learner's model, with adapters as after some steps."""

    def __init__(self, path: str, seed: int) -> None:
        self.model = add_adapters(load_causal_lm(path), {ADAPTER: LORA}, "float32")
        self._names = CheckpointNames.of(self.model.config)
        dice = torch.Generator().manual_seed(seed)
        for _, low_rank in adapters(self.model):
            for matrix in (low_rank.a_RI, low_rank.b_OR):
                matrix.data = 0.2 * torch.randn(matrix.shape, generator=dice)

    def buckets(self) -> list[WeightBucket]:
        sent = list_outgoing(self.model, LORA, "float32")
        stream = WeightStream(self.model, "float32", 1 << 12, sent, self._names)
        store = ObjectStore("float32")
        return [store.post(index, stream.unshard_bucket(index)) for index in range(stream.num_buckets)]

    def score(self, ids: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            logprobs_TV = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, ids[1:], strict=True)]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(device: str, model_path: str, runner: asyncio.Runner) -> Iterator[VllmEngine]:
    dtype, kv_cache_mb = ("float32", 16) if device == "cpu" else ("bfloat16", 256)
    engine = VllmEngine(
        EngineSpec(path=model_path, role="policy", dtype=dtype, device=device, adapters={"policy": LORA}),
        VllmConfig(max_batch_rows=4, kv_cache_mb=kv_cache_mb),
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tolerance(device: str) -> float:
    """Beside float32."""
    return 1e-4 if device == "cpu" else 0.25


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
    engine: VllmEngine, run: Any, ask: Any, prompt_of: Any, plain: Any, model_path: str, tolerance: float
) -> None:
    ids = prompt_of(40)
    base = plain.logits(ids)[:-1].log_softmax(-1)
    assert run(engine.score(ids)) == pytest.approx(
        [float(logprobs_V[token]) for logprobs_V, token in zip(base, ids[1:], strict=True)], abs=tolerance
    )
    for version in (1, 2):
        trained = Trained(model_path, version)
        sent = trained.buckets()
        receipt = run(push(engine, sent, version))
        assert receipt.checksums == {tensor.name: tensor.checksum for bucket in sent for tensor in bucket.tensors}
        assert (len(receipt.checksums), receipt.unapplied) == (TENSORS, ())
        assert run(engine.score(ids)) == pytest.approx(trained.score(ids), abs=tolerance)
        completion = run(ask(engine, ids, f"after {version}", max_new_tokens=20))
        whole = trained.score((*ids, *completion.token_ids))
        assert completion.logprobs == pytest.approx(whole[len(ids) - 1 :], abs=tolerance)
        assert completion.oldest_version == version


def test_kept_request_continues_with_the_new_adapter(
    engine: VllmEngine, run: Any, ask: Any, prompt_of: Any, model_path: str, tolerance: float
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
    assert completion.logprobs[after.start :] == pytest.approx(whole[len(ids) - 1 + after.start :], abs=tolerance)
    assert isinstance(before, VersionSpan) and before.end == after.start > 0


def test_a_push_of_nothing_and_one_that_broke_off_leave_the_adapter(
    engine: VllmEngine, run: Any, prompt_of: Any, model_path: str, tolerance: float
) -> None:
    ids, trained, other = prompt_of(30), Trained(model_path, 3), Trained(model_path, 4)

    async def break_off() -> None:
        await engine.pause()
        await engine.begin_weights()
        await engine.load_bucket(other.buckets()[0])
        await engine.resume()

    run(push(engine, trained.buckets(), 3))
    run(break_off())
    assert run(engine.score(ids)) == pytest.approx(trained.score(ids), abs=tolerance)
    assert run(push(engine, [], 4)).checksums == {}
    assert run(engine.score(ids)) == pytest.approx(trained.score(ids), abs=tolerance)


def test_only_some_buckets_change_only_their_layers(
    engine: VllmEngine, run: Any, prompt_of: Any, model_path: str, tolerance: float
) -> None:
    ids, one, other = prompt_of(30), Trained(model_path, 3), Trained(model_path, 4)
    run(push(engine, one.buckets(), 3))
    run(push(engine, other.buckets()[:1], 4))
    sent = {tensor.name for tensor in other.buckets()[0].tensors}
    parameters, newer = dict(one.model.named_parameters()), dict(other.model.named_parameters())
    for name in sent:
        parameters[name].data = newer[name].data
    assert 0 < len(sent) < TENSORS
    assert run(engine.score(ids)) == pytest.approx(one.score(ids), abs=tolerance)


def test_a_tensor_that_is_no_adapter_of_this_model_is_refused_by_name(
    engine: VllmEngine, run: Any, prompt_of: Any, model_path: str, tolerance: float
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
    assert run(engine.score(prompt_of(30))) == pytest.approx(trained.score(prompt_of(30)), abs=tolerance)


def save_mixture(path: Path, tokenizer_of: str) -> str:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=272, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=128, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        intermediate_size=64, initializer_range=0.2, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(path)
    return str(path)


def test_a_mixture_with_adapters_is_refused_on_a_cpu(model_path: str, tmp_path: Path) -> None:
    """vLLM would start, and die at the first request."""
    with pytest.raises(ValueError, match=r"^lora\.sync: .*mixture of experts.*lora\.sync=merged"):
        VllmEngine(
            EngineSpec(path=save_mixture(tmp_path, model_path), role="policy", adapters={"policy": LORA}),
            VllmConfig(kv_cache_mb=16),
        )


def test_adapters_of_a_model_in_two_halves_score_as_the_learners(model_path: str, prompt_of: Any) -> None:
    config, ids = VllmConfig(max_batch_rows=2, kv_cache_mb=16), prompt_of(40)
    engine = VllmEngine(EngineSpec(path=model_path, role="policy", adapters={"policy": LORA}, num_gpus=2), config)

    async def scene() -> None:
        for version in (1, 2):
            trained = Trained(model_path, version)
            receipt = await push(engine, trained.buckets(), version)
            assert (receipt.unapplied, len(receipt.checksums)) == ((), TENSORS)
            assert await engine.score(ids) == pytest.approx(trained.score(ids), abs=1e-3)

    try:
        asyncio.run(scene())
    finally:
        engine.close()


FAULTY = """
from vllm.lora.layers import RowParallelLinearWithLoRA
from grmpipe.models.engines.vllm import vllm_worker

RowParallelLinearWithLoRA.set_lora = lambda self, index, lora_a, lora_b: None
Faulty = vllm_worker.WeightReceiver
"""


def test_layers_that_do_not_hold_what_arrived_are_reported_by_name(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty_adapters.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vllm_options, "WORKER_EXTENSION", "faulty_adapters.Faulty")
    engine = VllmEngine(
        EngineSpec(path=model_path, role="policy", adapters={"policy": LORA}),
        VllmConfig(max_batch_rows=2, kv_cache_mb=16),
    )
    try:
        receipt = asyncio.run(push(engine, Trained(model_path, 1).buckets(), 1))
    finally:
        engine.close()
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in receipt.unapplied} == {"o_proj", "down_proj"}
    assert len(receipt.unapplied) == 3 * 2 * 2


def test_a_push_of_one_adapter_leaves_requests_of_others_running(
    model_path: str, ask: Any, prompt_of: Any, tmp_path: Path
) -> None:
    """And each scores as its learner's model; one comes from a file."""
    learners = {name: Trained(model_path, seed) for seed, name in enumerate(("a", "b"), 21)}
    save_adapters(str(tmp_path / "a"), learners["a"].model, learners["a"].model.state_dict(), LORA)
    loras = {"a": replace(LORA, path=str(tmp_path / "a")), "b": LORA}
    engine = VllmEngine(
        EngineSpec(path=model_path, role="base", adapters=loras), VllmConfig(max_batch_rows=4, kv_cache_mb=16)
    )
    a, b = AdapterView(engine, "a"), AdapterView(engine, "b")
    ids = prompt_of(20)

    async def scene() -> None:
        assert await a.score(ids) == pytest.approx(learners["a"].score(ids), abs=1e-4)
        assert await b.score(ids) == pytest.approx(await engine.score(ids), abs=1e-6), "it changes nothing so far"
        begun = asyncio.Event()
        beside = asyncio.create_task(ask(a, ids, "beside", max_new_tokens=80, on_first_token=begun.set))
        await begun.wait()
        await b.pause()
        waits = asyncio.create_task(ask(b, ids, "waits", max_new_tokens=30))
        await b.begin_weights()
        for bucket in learners["b"].buckets():
            await b.load_bucket(bucket)
        await ask(a, ids, "meanwhile", max_new_tokens=4)  # would wait forever if its requests were held
        assert not waits.done()
        receipt = await b.commit_weights(5)
        await b.resume()
        assert (len(receipt.checksums), receipt.unapplied) == (TENSORS, ())
        kept, new = await beside, await waits
        assert [(span.model, span.version) for span in kept.versions] == [("a", 0)]
        assert [(span.model, span.version) for span in new.versions] == [("b", 5)]
        for name, completion in (("a", kept), ("b", new)):
            whole = learners[name].score((*ids, *completion.token_ids))
            assert completion.logprobs == pytest.approx(whole[len(ids) - 1 :], abs=1e-4)
        assert await a.score(ids) == pytest.approx(learners["a"].score(ids), abs=1e-4)
        assert await b.score(ids) == pytest.approx(learners["b"].score(ids), abs=1e-4)

    try:
        asyncio.run(asyncio.wait_for(scene(), 120))
    finally:
        engine.close()
