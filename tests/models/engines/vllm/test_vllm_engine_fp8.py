"""Weights that vLLM rounds to fp8 itself, with its kernels for CPUs, or on a GPU: at its start, and at every push."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.settings import VllmConfig
from grmpipe.models.types import WeightReceipt
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.weight_stream import WeightStream
from grmpipe.scheduler.weights.weight_push import (
    TOLERANCE,
    TOLERANCE_QUANTIZED,
    WeightMismatch,
    check_probe,
    probe_error,
)

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def test_push_is_quantized_again_and_passes_only_with_the_wider_tolerance(
    device: str, model_path: str, next_version_path: str, prompt_of: Any, plain: Any, next_plain: Any
) -> None:
    ids, kv_cache_mb = prompt_of(100), 16 if device == "cpu" else 256
    engine = VllmEngine(
        EngineSpec(path=model_path, role="policy", dtype="bfloat16", device=device),
        VllmConfig(kv_cache_mb=kv_cache_mb, quantization="fp8"),
    )

    def expected(whole: Any) -> list[float]:
        logprobs_TV = whole.logits(ids)[:-1].log_softmax(-1)
        return [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, ids[1:], strict=True)]

    async def push(path: str, version: int) -> WeightReceipt:
        stream, store = WeightStream(load_causal_lm(path), "bfloat16", 1 << 14), ObjectStore("bfloat16")
        await engine.pause()
        await engine.begin_weights()
        for index in range(stream.num_buckets):
            await engine.load_bucket(store.post(index, stream.unshard_bucket(index)))
        receipt = await engine.commit_weights(version)
        await engine.resume()
        return receipt

    async def scene() -> None:
        graphs = "no" if device == "cpu" else r"\d+ sizes of"
        room = rf"vLLM started in \d+ s: keys and values of [\d,]+ tokens, {graphs} CUDA graphs"
        assert re.match(room, engine.describe_start())
        before = await engine.score(ids)
        assert (await push(next_version_path, 1)).unapplied == ()
        after = await engine.score(ids)
        for scored, whole in ((before, plain), (after, next_plain)):
            error = check_probe("policy-0", 1, expected(whole), scored, TOLERANCE_QUANTIZED)
            assert 10 * TOLERANCE < error < probe_error(before, after) / 3
            with pytest.raises(WeightMismatch):
                check_probe("policy-0", 1, expected(whole), scored, TOLERANCE)
        await push(model_path, 2)
        assert float(np.abs(np.subtract(await engine.score(ids), before)).max()) < 1e-3  # the same rounding again

    try:
        asyncio.run(scene())
    finally:
        engine.close()
