"""What only a GPU can show of vLLM: memory that is really freed, weights that stay on the device. In bfloat16 and with
graphs, as a run starts it (FlashAttention takes no float32).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.moe.expert_routing import Routers
from grmpipe.models.settings import VllmConfig
from grmpipe.models.types import ModelFiles, WeightBucket
from grmpipe.models.weights.transport_ends import open_transport
from grmpipe.models.weights.weight_stream import WeightStream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
KV_CACHE_MB = 512
BFLOAT16_NATS = 0.25  # beside transformers in float32


@pytest.mark.parametrize("transport", ["shared_memory", "cuda_ipc"])
def test_vllm_sleeps_wakes_and_takes_weights(
    model_path: str, next_version_path: str, prompt_of: Any, next_plain: Any, tmp_path: Path, transport: str
) -> None:
    spec = EngineSpec(path=model_path, role="policy", dtype="bfloat16", device="cuda", sleeps=True)
    engine = VllmEngine(spec, VllmConfig(kv_cache_mb=KV_CACHE_MB))
    device = torch.device("cuda:0")
    stream = WeightStream(load_causal_lm(next_version_path, device="cuda"), "bfloat16", bucket_bytes=1 << 15)
    sender = open_transport(transport, "bfloat16", device, str(tmp_path))

    async def use() -> tuple[int, tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        before = await engine.score(prompt_of(40))
        await engine.pause()
        freed = await engine.sleep()
        await engine.wake()
        await engine.resume()
        after_sleep = await engine.score(prompt_of(40))
        await engine.pause()
        await engine.begin_weights()
        for index in range(stream.num_buckets):
            await engine.load_bucket(sender.post(index, stream.unshard_bucket(index)))
        await engine.commit_weights(1)
        await engine.resume()
        return freed, before, after_sleep, await engine.score(prompt_of(40))

    try:
        freed, before, after_sleep, after_push = asyncio.run(use())
    finally:
        engine.close()
        sender.close()
    assert freed >= KV_CACHE_MB << 20
    assert after_sleep == before
    ids = prompt_of(40)
    logprobs_TV = next_plain.logits(ids)[:-1].log_softmax(-1)
    expected = [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, ids[1:], strict=True)]
    assert float(np.abs(np.subtract(after_push, expected)).max()) < BFLOAT16_NATS


def test_vllm_reads_the_files_of_another_model_into_the_same_memory(
    model_path: str, next_version_path: str, ask: Any, prompt_of: Any, next_plain: Any
) -> None:
    """Its graphs were captured with the first model: they read the weights at the same addresses."""
    spec = EngineSpec(path=model_path, role="grm", dtype="bfloat16", device="cuda")
    engine = VllmEngine(spec, VllmConfig(kv_cache_mb=KV_CACHE_MB))

    async def read(path: str, version: int) -> None:
        await engine.pause()
        await engine.begin_weights()
        await engine.load_bucket(WeightBucket(tensors=(), payload=ModelFiles(path=path)))
        await engine.commit_weights(version)
        await engine.resume()

    async def use() -> tuple[Any, ...]:
        first = await engine.score(prompt_of(40))
        free = torch.cuda.mem_get_info()[0]
        await read(next_version_path, 1)
        completion = await ask(engine, prompt_of(40), "other", max_new_tokens=20)
        await read(model_path, 0)
        return first, completion, await engine.score(prompt_of(40)), free - torch.cuda.mem_get_info()[0]

    try:
        first, completion, again, num_grown = asyncio.run(use())
    finally:
        engine.close()
    assert (
        np.abs(np.subtract(completion.logprobs, next_plain.logprobs(prompt_of(40), completion))).max() < BFLOAT16_NATS
    )
    assert again == first
    assert num_grown < 64 << 20


def test_vllm_reports_the_experts_that_the_model_itself_would_choose(
    tmp_path: Path, model_path: str, ask: Any, prompt_of: Any
) -> None:
    """A layer without experts has none. Near-ties of the routers may change."""
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=272, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128, num_experts=8,
        num_experts_per_tok=2, mlp_only_layers=[1], initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(shape).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path)
    spec = EngineSpec(path=str(tmp_path), role="policy", dtype="bfloat16", device="cuda", return_routed_experts=True)
    engine = VllmEngine(spec, VllmConfig(kv_cache_mb=KV_CACHE_MB))
    try:
        completion = asyncio.run(ask(engine, prompt_of(20), max_new_tokens=40))
    finally:
        engine.close()
    model = load_causal_lm(str(tmp_path))
    fed = (*prompt_of(20), *completion.token_ids)[:-1]
    with torch.no_grad(), Routers.of(model).record_routing() as recording:
        model(torch.tensor([fed]))
    assert completion.experts_TLK is not None and completion.experts_TLK.shape == (len(fed), 2, 2)
    own = np.sort(recording.experts_TLK.numpy(), -1)
    assert (np.sort(completion.experts_TLK, -1) == own).mean() > 0.95
