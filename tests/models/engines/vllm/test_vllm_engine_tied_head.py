"""On a CPU vLLM keeps a copy of a tied head that its own reload doesn't update. The contract tests our fix to 1e-4."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm import options as vllm_options
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.settings import VllmConfig
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.weight_stream import WeightStream

pytestmark = [pytest.mark.vllm, pytest.mark.long]

FAULTY = """
from grmpipe.models.engines.vllm import vllm_worker

vllm_worker.repack_heads = lambda model: None
Faulty = vllm_worker.WeightReceiver
"""


def test_without_the_fix_a_probe_after_a_push_is_far_off(
    model_path: str, next_version_path: str, prompt_of: Any, next_plain: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "faulty_worker.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vllm_options, "WORKER_EXTENSION", "faulty_worker.Faulty")
    engine = VllmEngine(EngineSpec(path=model_path, role="policy"), VllmConfig(kv_cache_mb=16))
    stream, store = WeightStream(load_causal_lm(next_version_path), "float32", 1 << 20), ObjectStore("float32")

    async def push_and_probe() -> tuple[float, ...]:
        await engine.pause()
        await engine.begin_weights()
        for index in range(stream.num_buckets):
            await engine.load_bucket(store.post(index, stream.unshard_bucket(index)))
        await engine.commit_weights(1)
        await engine.resume()
        return await engine.score(prompt_of(64))

    try:
        probed = asyncio.run(push_and_probe())
    finally:
        engine.close()
    ids = prompt_of(64)
    logprobs_TV = next_plain.logits(ids)[:-1].log_softmax(-1)
    expected = [float(logprobs_V[token]) for logprobs_V, token in zip(logprobs_TV, ids[1:], strict=True)]
    assert float(np.abs(np.subtract(probed, expected)).max()) > 0.1  # 100 times the tolerance of a push
