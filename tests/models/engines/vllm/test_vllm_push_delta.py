"""Weights that come to vLLM as what changed in them, on a CPU: its fused layers take every changed value."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.settings import VllmConfig
from grmpipe.models.types import WeightDelta
from grmpipe.models.weights.delta import DeltaSender
from grmpipe.models.weights.weight_stream import WeightStream

pytestmark = [pytest.mark.vllm, pytest.mark.long]


def test_a_push_of_changes_leaves_vllm_with_what_a_whole_push_would(
    model_path: str, prompt_of: Any, tmp_path: Path
) -> None:
    ids, model = prompt_of(40), load_causal_lm(model_path)
    engine = VllmEngine(EngineSpec(path=model_path, role="policy", dtype="bfloat16"), VllmConfig(kv_cache_mb=16))
    stream, sender = WeightStream(model, "bfloat16", 1 << 15), DeltaSender("disk", "bfloat16", str(tmp_path))

    async def push(version: int, *, is_whole: bool) -> tuple[float, ...]:
        sender.is_whole, sent = is_whole, {}
        await engine.pause()
        await engine.begin_weights()
        for index in range(stream.num_buckets):
            bucket = sender.post(index, stream.unshard_bucket(index))
            assert isinstance(bucket.payload, WeightDelta) and bool(bucket.payload.base) != is_whole
            await engine.load_bucket(bucket)
            sent |= {tensor.name: tensor.checksum for tensor in bucket.tensors}
        receipt = await engine.commit_weights(version)
        assert (receipt.checksums, receipt.unapplied) == (sent, ())
        await engine.resume()
        return await engine.score(ids)

    async def scene() -> None:
        first = await push(1, is_whole=True)
        with torch.no_grad():
            for weight in model.parameters():
                weight[torch.rand_like(weight) < 0.1] *= 1.5
        changed = await push(2, is_whole=False)
        assert changed == await push(3, is_whole=True) != first

    try:
        asyncio.run(scene())
    finally:
        engine.close()
        sender.close()
