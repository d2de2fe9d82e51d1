"""An engine that quantizes: it samples from rounded weights, and a push passes only if its options declare it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.logprobs import LOGPROB, Wanted, compute_chosen_logprobs
from grmpipe.models.lm.quantize import quantize_matrices
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import WeightReceipt
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.weight_stream import WeightStream

PROBE = tuple(range(3, 30))


async def push(engine: EmbeddedEngine, path: str, version: int) -> WeightReceipt:
    stream, store = WeightStream(load_causal_lm(path), "float32", 8192), ObjectStore("float32")
    await engine.pause()
    await engine.begin_weights()
    for index in range(stream.num_buckets):
        await engine.load_bucket(store.post(index, stream.unshard_bucket(index)))
    receipt = await engine.commit_weights(version)
    await engine.resume()
    return receipt


def expected(path: str, kind: str) -> list[float]:
    model = load_causal_lm(path)
    if kind != "none":
        quantize_matrices(model, kind)
    ids = torch.tensor([PROBE])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0]
    return compute_chosen_logprobs(logits[:-1], Wanted(chosen_R=ids[0, 1:]))[:, LOGPROB].tolist()


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantized_engine_computes_with_rounded_weights_before_and_after_a_push(
    model_path: str, next_version_path: str, kind: str
) -> None:
    engine = EmbeddedEngine(EngineSpec(path=model_path, role="policy"), EmbeddedConfig(quantize=kind))

    async def run() -> None:
        assert await engine.score(PROBE) == pytest.approx(expected(model_path, kind), abs=1e-4)
        receipt = await push(engine, next_version_path, 1)
        assert len(receipt.checksums) > 10  # of the received weights, before rounding
        assert await engine.score(PROBE) == pytest.approx(expected(next_version_path, kind), abs=1e-4)
        exact = expected(next_version_path, "none")
        assert max(abs(a - b) for a, b in zip(await engine.score(PROBE), exact, strict=True)) > 1e-3

    asyncio.run(run())
    engine.close()


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="quantize: unknown value 'int3'; known: none, int8, int4, fp8"):
        EmbeddedConfig(quantize="int3")
