"""A model sharded over two processes of vLLM, on a CPU: a push reaches both halves of every layer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.settings import VllmConfig
from grmpipe.models.types import WeightReceipt
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.weight_stream import WeightStream

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def test_fused_layers_and_a_tied_head_in_two_halves_take_a_push_and_score_as_the_whole_model(
    model_path: str, next_version_path: str, prompt_of: Any, plain: Any, next_plain: Any
) -> None:
    ids = prompt_of(40)
    engine = VllmEngine(EngineSpec(path=model_path, role="policy", num_gpus=2), VllmConfig(kv_cache_mb=16))

    def expected(whole: Any) -> list[float]:
        logprobs_TV = whole.logits(ids)[:-1].log_softmax(-1)
        return [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, ids[1:], strict=True)]

    async def push(path: str, version: int) -> WeightReceipt:
        stream, store = WeightStream(load_causal_lm(path), "float32", 1 << 15), ObjectStore("float32")
        await engine.pause()
        await engine.begin_weights()
        for index in range(stream.num_buckets):
            await engine.load_bucket(store.post(index, stream.unshard_bucket(index)))
        receipt = await engine.commit_weights(version)
        await engine.resume()
        return receipt

    async def scene() -> None:
        assert await engine.score(ids) == pytest.approx(expected(plain), abs=1e-3)
        for version, (path, whole) in enumerate([(next_version_path, next_plain), (model_path, plain)], start=1):
            assert (await push(path, version)).unapplied == ()
            assert await engine.score(ids) == pytest.approx(expected(whole), abs=1e-3)

    try:
        asyncio.run(scene())
    finally:
        engine.close()
