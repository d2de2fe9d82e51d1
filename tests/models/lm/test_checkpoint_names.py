"""Tensors streamed to serving engines are those that transformers would save: names, shapes and numbers, family by
family.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grmpipe.models.lm.checkpoint_names import CheckpointNames
from grmpipe.models.lm.lora import ADAPTER, add_adapters, list_outgoing
from grmpipe.models.settings import LoraConfig
from grmpipe.models.weights.bucket_size import choose_bucket_bytes
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.receive_tensors import receive_tensors
from grmpipe.models.weights.weight_stream import WeightStream

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None,
}  # fmt: skip
# Mixtures and, last, a dense model, whose names in a checkpoint are the model's own.
FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "granitemoe", "glm4_moe", "deepseek_v2", "deepseek_v3",
    "minimax_m2", "phimoe", "ernie4_5_moe", "hunyuan_v1_moe", "cohere2_moe", "qwen3",
)  # fmt: skip


def small_model(family: str) -> PreTrainedModel:
    config: Any = CONFIG_MAPPING[family]()
    for key, value in SMALL.items():
        if hasattr(config, key):
            setattr(config, key, value)
    if family.startswith("deepseek"):
        config.first_k_dense_replace, config.num_key_value_heads, config.n_group, config.topk_group = 1, 4, 1, 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def streamed(model: PreTrainedModel, bucket_bytes: int = 1 << 14) -> dict[str, Tensor]:
    return {name: tensor for bucket in buckets(model, bucket_bytes) for name, tensor in bucket.items()}


def buckets(model: PreTrainedModel, bucket_bytes: int) -> list[dict[str, Tensor]]:
    stream, store = (
        WeightStream(model, "float32", bucket_bytes, names=CheckpointNames.of(model.config)),
        ObjectStore("float32"),
    )
    found = []
    for index in range(stream.num_buckets):
        with receive_tensors(store.post(index, stream.unshard_bucket(index))) as came:
            found.append({announced.name: tensor.clone() for announced, tensor in came})
    return found


@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 12])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_sent_as_transformers_saves_it(family: str, bucket_bytes: int) -> None:
    """Also where the experts of a layer fill several buckets."""
    model = small_model(family)
    own = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight" or not tied(model)}
    expected = revert_weight_conversion(model, own)
    sent = streamed(model, bucket_bytes)
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    for name, tensor in expected.items():
        torch.testing.assert_close(sent[name], tensor, atol=0, rtol=0)


def tied(model: PreTrainedModel) -> bool:
    return bool(model.config.tie_word_embeddings)


def test_experts_travel_one_by_one() -> None:
    sent = streamed(small_model("qwen3_moe"))
    assert sent["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (16, 32)
    assert not [name for name in sent if name.endswith("experts.gate_up_proj")]


@pytest.mark.parametrize(("family", "last"), [("qwen3_moe", "gate_proj"), ("mixtral", "w1")])
def test_the_experts_of_a_layer_are_never_in_one_bucket_if_they_fill_several(family: str, last: str) -> None:
    """An expert has at most 4 KiB of gate and up in a Qwen, 16 in a Mixtral; a layer has 4 times that."""
    found = buckets(small_model(family), 1 << 14)
    together = [[name for name in bucket if name.endswith(f"{last}.weight")] for bucket in found]
    assert sorted(map(len, together))[-1] == (4 if family == "qwen3_moe" else 1)
    halves = [[name for name in bucket if name.endswith("gate_proj.weight")] for bucket in
              buckets(small_model("qwen3_moe"), 1 << 13)]  # fmt: skip
    assert [len(names) for names in halves if names] == [2, 2, 2, 2]


def test_an_engine_takes_a_tied_head_under_both_names() -> None:
    config = CONFIG_MAPPING["qwen3_moe"](**SMALL, tie_word_embeddings=True)
    shapes, held = CheckpointNames.of(config).list_engine_tensors()
    assert shapes["lm_head.weight"] == (64, 32)
    assert held["lm_head.weight"] == held["model.embed_tokens.weight"] == "model.embed_tokens.weight"


def test_a_family_that_needs_several_tensors_for_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from grmpipe.models.lm import checkpoint_names

    def fused(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"qkv": next(iter(state.values()))} if len(state) > 1 else dict(state)

    monkeypatch.setattr(checkpoint_names, "revert_weight_conversion", fused)
    with pytest.raises(ValueError, match=r"^engine: .*'qwen3_moe'.* built from several.*type engine=embedded"):
        CheckpointNames.of(CONFIG_MAPPING["qwen3_moe"](**SMALL))


@pytest.mark.parametrize(
    ("model_bytes", "bucket_bytes"), [(1 << 20, 64 << 20), (8 << 30, 512 << 20), (1 << 40, 1 << 30)]
)
def test_a_larger_model_travels_in_larger_buckets(model_bytes: int, bucket_bytes: int) -> None:
    assert choose_bucket_bytes(0, model_bytes) == bucket_bytes and choose_bucket_bytes(5, model_bytes) == 5


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_adapters_keep_their_names(family: str) -> None:
    lora = LoraConfig(rank=2, sync="adapters")
    model = add_adapters(small_model(family), {ADAPTER: lora}, "float32")
    sent = list_outgoing(model, lora, "float32")
    stream = WeightStream(model, "float32", 1 << 14, sent, CheckpointNames.of(model.config))
    names = [name for index in range(stream.num_buckets) for name in stream.unshard_bucket(index).names]
    assert names == [piece.name for piece in sent.changing] and len(names) >= 2 * 2 * 4
