"""The sizes in a plan, against real models: their parameters, and what autograd keeps of a forward pass."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from grmpipe.models.lm.causal_lm import ONE_LOAD_AT_A_TIME, compute_packed_logprobs, load_causal_lm
from grmpipe.models.lm.footprint import footprint_of_shape, measure_outline, read_footprint, read_plain_footprint
from grmpipe.models.lm.lora import add_adapters
from grmpipe.models.lm.packed_attention import PACKED_ATTENTION
from grmpipe.models.lm.parallel.ranks import choose_device, join_ranks
from grmpipe.models.lm.parallelize import checkpoint_layers, decoder_layers, load_parallel
from grmpipe.models.model_files import PlainConfig
from grmpipe.models.settings import KEEP_ALL, Activations, LoraConfig, ModelShape
from grmpipe.tiny.resolve import SHIPPED

POLICY = str(SHIPPED / "policy")
# As in the public config.json files.
QWEN3_8B = ModelShape(
    num_layers=36, hidden_size=4096, intermediate_size=12288, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=151936, context_tokens=40960,
)  # fmt: skip
QWEN3_0_6B = ModelShape(
    num_layers=28, hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8, head_dim=128,
    vocab_size=151936, context_tokens=40960, tied=True,
)  # fmt: skip
QWEN3_32B = replace(QWEN3_8B, num_layers=64, hidden_size=5120, intermediate_size=25600, num_heads=64)
WIDE = ModelShape(
    num_layers=4, hidden_size=128, intermediate_size=384, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=64,
    context_tokens=1024,
)  # fmt: skip
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
FULL, SELECTIVE = Activations(checkpointing="full"), Activations(checkpointing="selective")
OFFLOADED = Activations(checkpointing="full", offload=True)


def qwen_config(shape: ModelShape) -> PretrainedConfig:
    return Qwen3Config(
        num_hidden_layers=shape.num_layers, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab_size, tie_word_embeddings=shape.tied, max_position_embeddings=shape.context_tokens,
    )  # fmt: skip


def test_a_directory_is_measured_as_the_model_in_it() -> None:
    model, footprint = load_causal_lm(POLICY), read_footprint(POLICY)
    assert footprint.num_parameters == model.num_parameters()
    assert footprint.weight_bytes("float32") == sum(p.nbytes for p in model.parameters())
    in_layers = sum(p.numel() for layer in decoder_layers(model) for p in layer.parameters())
    assert footprint.num_root_parameters == pytest.approx(model.num_parameters() - in_layers, rel=0.01)


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("tied", [True, False])
def test_the_config_of_a_plain_family_gives_the_sizes_of_its_model(
    family: type[PretrainedConfig], tied: bool, tmp_path: Path
) -> None:
    sizes = {**SMALL, "head_dim": 16, "tie_word_embeddings": tied, "sliding_window": None}
    family(**sizes).save_pretrained(tmp_path)
    config = PlainConfig.read(str(tmp_path))
    assert config is not None
    assert read_plain_footprint(config) == measure_outline(str(tmp_path))


@pytest.mark.parametrize(
    "changed",
    [{"attention_bias": True}, {"sliding_window": 8, "use_sliding_window": True}, {"num_key_value_heads": None}],
)
def test_a_config_that_says_more_or_less_is_left_to_transformers(changed: dict[str, object], tmp_path: Path) -> None:
    Qwen3Config(**{**SMALL, "tie_word_embeddings": True}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = {**json.loads(file.read_text()), "layer_types": None, **changed}
    file.write_text(json.dumps(values))
    config = PlainConfig.read(str(tmp_path))
    assert config is not None and read_plain_footprint(config) is None


@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"]])
def test_adapters_are_as_large_as_those_of_the_model_and_of_its_shape(targets: list[str], tmp_path: Path) -> None:
    qwen_config(WIDE).save_pretrained(tmp_path)
    measured = read_footprint(str(tmp_path)).adapter_parameters(4, targets)
    model = add_adapters(
        AutoModelForCausalLM.from_config(qwen_config(WIDE)), {"default": LoraConfig(4, 8.0, targets)}, "float32"
    )
    assert measured == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert measured == footprint_of_shape(WIDE).adapter_parameters(4, targets)


def test_the_cache_holds_a_key_and_a_value_for_every_layer_and_head() -> None:
    model = load_causal_lm(POLICY)
    cache = model(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 4 * read_footprint(POLICY).kv_bytes_per_token("float32")


def test_a_declared_shape_is_as_large_as_the_model_it_describes(tmp_path: Path) -> None:
    qwen_config(QWEN3_8B).save_pretrained(tmp_path)
    real, declared = read_footprint(str(tmp_path)), footprint_of_shape(QWEN3_8B)
    assert real.num_parameters == 8_190_735_360
    assert declared.num_parameters == pytest.approx(real.num_parameters, rel=1e-5)
    assert declared.num_root_parameters == real.num_root_parameters
    assert (declared.query_width, declared.kv_width) == (real.query_width, real.kv_width)


def test_a_tied_head_is_counted_once() -> None:
    tied = ModelShape(**{name: getattr(WIDE, name) for name in WIDE.__dataclass_fields__} | {"tied": True})
    assert footprint_of_shape(WIDE).num_parameters - footprint_of_shape(tied).num_parameters == 64 * 128


def test_a_shape_is_declared_whole_or_not_at_all() -> None:
    assert not ModelShape().declared
    with pytest.raises(ValueError, match=r"^hidden_size: .* declare all fields"):
        ModelShape(num_layers=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_activations_are_what_autograd_keeps(dtype: str, checkpointing: str) -> None:
    """Kept bytes are counted by hooks. The logits are kept once: their gradient comes later."""
    activations = Activations(checkpointing=checkpointing)
    model = AutoModelForCausalLM.from_config(
        qwen_config(WIDE), dtype=getattr(torch, dtype), attn_implementation=PACKED_ATTENTION
    )
    footprint = footprint_of_shape(WIDE)
    of_head = 4 * footprint.hidden_size + footprint.vocab_size
    checkpoint_layers(model, decoder_layers(model), activations)
    expected = (footprint.kept_values(activations) + of_head) * getattr(torch, dtype).itemsize
    assert kept_bytes(model, num_tokens=256) / 256 == pytest.approx(expected, rel=0.15)


def kept_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    """Bytes kept for backward, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    token_ids_T = torch.randint(0, model.config.vocab_size, (num_tokens,))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute_packed_logprobs(model, token_ids_T, torch.arange(num_tokens), torch.tensor([num_tokens]))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for address, size in storages.items() if address not in weights)


def test_the_learners_state_is_16_bytes_a_parameter() -> None:
    device = choose_device("cpu", 0)
    model = load_parallel(POLICY, join_ranks(0, 1, None, device), device, "float32", "bfloat16")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    held = [*model.parameters(), *(p.grad for p in model.parameters()), *moments]
    num_bytes = sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in held)
    footprint = read_footprint(POLICY)
    assert num_bytes == 4 * footprint.shard_bytes(1) == 16 * footprint.num_parameters


@pytest.mark.parametrize(
    ("shape", "ranks", "num_tokens", "activations", "peak_gb"),
    [
        (QWEN3_0_6B, 1, 8192, FULL, 11.54),
        (QWEN3_8B, 4, 32768, OFFLOADED, 45.08),
        (QWEN3_32B, 8, 16384, OFFLOADED, 46.16 + 32.76),
    ],
)
def test_a_learners_peak_is_what_fake_tensors_count(
    shape: ModelShape, ranks: int, num_tokens: int, activations: Activations, peak_gb: float
) -> None:
    """As counted by benchmarks/learner_memory.py, which takes minutes; moments of the largest one are added."""
    footprint = footprint_of_shape(shape)
    working = footprint.estimate_working_bytes("bfloat16", num_tokens, activations, ranks=ranks)
    assert (4 * footprint.shard_bytes(ranks) + working.total) / 1e9 == pytest.approx(peak_gb, rel=0.03)


def test_without_recomputing_all_layers_wait_and_frozen_weights_get_no_gradient() -> None:
    footprint = footprint_of_shape(QWEN3_8B)
    saving = footprint.estimate_working_bytes("bfloat16", 4096, FULL)
    assert footprint.estimate_working_bytes("bfloat16", 4096).activations > 4 * saving.activations
    assert footprint.estimate_working_bytes("bfloat16", 4096, FULL, frozen=True).gathered < saving.gathered


def test_offloaded_inputs_dont_grow_with_depth_and_kept_attention_does() -> None:
    values = [
        [replace(footprint_of_shape(QWEN3_8B), num_layers=layers).kept_values(activations) for layers in (12, 36)]
        for activations in (OFFLOADED, FULL, SELECTIVE, KEEP_ALL)
    ]
    assert values[0][0] == values[0][1] == 2 * 4096
    assert [after - before for before, after in values[1:3]] == [24 * 4096, 24 * 2 * 4096]
    assert sorted(values) == values


def test_all_logits_exist_only_in_families_that_change_what_their_head_returns(tmp_path: Path) -> None:
    GraniteConfig(**SMALL, logits_scaling=3.0).save_pretrained(tmp_path / "granite")
    LlamaConfig(**SMALL).save_pretrained(tmp_path / "llama")
    scaling, plain = (read_footprint(str(tmp_path / kind)) for kind in ("granite", "llama"))
    assert (scaling.whole_logits, plain.whole_logits) == (True, False)
    grown = [
        replace(plain, vocab_size=10**6, whole_logits=whole).estimate_working_bytes("bfloat16", 1000)
        for whole in (0, 1)
    ]
    assert grown[1].activations - grown[0].activations == 2 * 2 * 10**9


def test_a_mixtures_token_passes_the_experts_that_it_chooses(tmp_path: Path) -> None:
    Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48).save_pretrained(tmp_path)
    assert read_footprint(str(tmp_path)).intermediate_size == 2 * 48


def test_gradient_of_the_head_dominates_memory_with_few_tokens() -> None:
    footprint = footprint_of_shape(QWEN3_8B)
    head = footprint.num_root_parameters // 2
    working = footprint.estimate_working_bytes("bfloat16", 64, OFFLOADED, ranks=4)
    assert working.gathered == head * (2 + 2 + 4 + 1) and working.activations < 0.01 * working.gathered


def test_a_footprint_is_not_taken_while_another_thread_loads_a_model() -> None:
    """Both set the process's default dtype for a moment: parameters of the other model would get it."""
    with ThreadPoolExecutor(1) as thread:
        with ONE_LOAD_AT_A_TIME:
            taken = thread.submit(measure_outline, POLICY)
            with pytest.raises(TimeoutError):
                taken.result(timeout=1.0)
        assert taken.result().num_parameters > 0
