"""A mixture of experts in vLLM: a push reaches its experts, and dropped experts are reported by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.vllm import options as vllm_options
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.checkpoint_names import CheckpointNames
from grmpipe.models.settings import VllmConfig
from grmpipe.models.types import WeightReceipt
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.weight_stream import WeightStream

pytestmark = pytest.mark.vllm

FAULTY = """
from pathlib import Path
from grmpipe.models.engines.vllm import vllm_worker

HAND_OVER = vllm_worker.Inbox._load
handed = []

def without_experts(inbox, tensors):
    drops = Path({flag!r}).exists()
    seen = [(name, tensor) for name, tensor in tensors if not (drops and ".experts." in name)]
    handed.extend(name for name, _ in seen)
    HAND_OVER(inbox, seen)

vllm_worker.Inbox._load = without_experts

class Faulty(vllm_worker.WeightReceiver):
    def take_handed(self):
        names = handed.copy()
        handed.clear()
        return names

    def digest(self):
        return self.weight_transfer_engine._application._digests()

    def load_experts_alone(self):
        self.weight_transfer_engine._experts._layers = {{}}
"""


def save_mixture(path: Path, tokenizer_of: str, seed: int) -> str:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=272, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=128, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        intermediate_size=64, initializer_range=0.2, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(path)
    return str(path)


def logprobs_of(path: str, ids: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        logits_TV = AutoModelForCausalLM.from_pretrained(path).eval()(torch.tensor([ids])).logits[0, :-1]
    logprobs: list[float] = logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return logprobs


def test_experts_arrive_and_dropped_experts_are_reported_by_the_same_push(
    model_path: str, prompt_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "drop"
    (tmp_path / "faulty_mixture.py").write_text(FAULTY.format(flag=str(flag)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vllm_options, "WORKER_EXTENSION", "faulty_mixture.Faulty")
    paths = [save_mixture(tmp_path / str(seed), model_path, seed) for seed in range(2)]
    model, first = load_causal_lm(paths[1]), load_causal_lm(paths[0])
    engine = VllmEngine(EngineSpec(path=paths[0], role="policy"), VllmConfig(kv_cache_mb=16))
    ask = engine._process.ask_workers
    ids = prompt_of(40)

    async def push(version: int, model: PreTrainedModel = model) -> WeightReceipt:
        # An expert's tensor has 4 KB: the four of a layer come in two buckets.
        stream = WeightStream(model, "float32", 10_000, names=CheckpointNames.of(model.config))
        store = ObjectStore("float32")
        await engine.pause()
        await engine.begin_weights()
        for index in range(stream.num_buckets):
            await engine.load_bucket(store.post(index, stream.unshard_bucket(index)))
        receipt = await engine.commit_weights(version)
        await engine.resume()
        return receipt

    async def scene() -> None:
        assert await engine.score(ids) == pytest.approx(logprobs_of(paths[0], ids), abs=1e-3)
        healthy = await push(1)
        stacks = [
            f"model.layers.{layer}.mlp.experts.{one}_proj" for layer in range(2) for one in ("down", "gate", "up")
        ]
        (handed,) = await ask("take_handed")
        assert sorted(name for name in handed if ".experts." in name) == stacks, "all experts of a layer at once"
        joined, scored = await ask("digest"), await engine.score(ids)
        assert (healthy.unapplied, len(healthy.checksums)) == ((), len(model.state_dict()) + 2 * (3 * 4 - 2))
        assert await engine.score(ids) == pytest.approx(logprobs_of(paths[1], ids), abs=1e-3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-6)
        flag.touch()
        dropped = await push(2)
        assert set(dropped.unapplied) == {name for name in dropped.checksums if ".experts." in name}
        flag.unlink()
        assert (await push(3, first)).unapplied == ()
        await ask("load_experts_alone")
        model.load_state_dict(load_causal_lm(paths[1]).state_dict())
        await ask("take_handed")
        assert (await push(4)).unapplied == ()
        assert sum(".experts." in name for name in (await ask("take_handed"))[0]) == 2 * 3 * 4
        assert await ask("digest") == joined, "bit for bit what vLLM makes of one expert after the other"
        assert await engine.score(ids) == scored

    try:
        asyncio.run(scene())
    finally:
        engine.close()
