"""Operations of a pass: hand-worked examples, and what torch counts while a real model computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from grmpipe.models.lm.causal_lm import compute_packed_logprobs
from grmpipe.models.lm.flops import FULL, ModelFlops, PackedSizes
from grmpipe.models.lm.footprint import footprint_of_shape, read_footprint
from grmpipe.models.lm.packed_attention import PACKED_ATTENTION
from grmpipe.models.lm.packing import Prefixes
from grmpipe.models.settings import LoraConfig, ModelShape

WIDE = ModelShape(
    num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=128,
    context_tokens=1024,
)  # fmt: skip
QWEN3_30B_A3B = ModelShape(
    num_layers=48, hidden_size=2048, intermediate_size=6144, num_heads=32, num_kv_heads=4, head_dim=128,
    vocab_size=151936, context_tokens=40960, num_experts=128, experts_per_token=8, moe_intermediate_size=768,
)  # fmt: skip


def small_config(kind: type[PretrainedConfig] = Qwen3Config, **more: object) -> PretrainedConfig:
    return kind(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=128, max_position_embeddings=1024, tie_word_embeddings=False, **more,
    )  # fmt: skip


def sizes(lengths: list[int], prefixes: list[int] | None = None, head_rows: int = 0) -> PackedSizes:
    return PackedSizes(lengths_S=lengths, prefixes_S=prefixes or [0] * len(lengths), head_rows=head_rows)


def test_dense_model_takes_6_operations_per_weight_and_token_plus_its_attention() -> None:
    flops = ModelFlops(layer_weights=100, head_weights=10, attention={})
    assert flops.count_training(sizes([3, 4], head_rows=5)) == 6 * (100 * 7 + 10 * 5)
    assert flops.forward(sizes([3, 4], head_rows=5)) == 2 * (100 * 7 + 10 * 5)


def test_a_causal_mask_leaves_n_n_plus_1_over_2_pairs_of_each_sample() -> None:
    assert sizes([4]).pairs() == 1 + 2 + 3 + 4
    assert sizes([4, 3]).pairs() == 10 + 6, "samples don't see each other"
    assert sizes([4, 2], [0, 4]).pairs() == 10 + (5 + 6), "a sibling sees the shared prompt, which is computed once"
    attention = ModelFlops(layer_weights=0, head_weights=0, attention={FULL: 4 * 8})  # 2 for scores, 2 for values
    assert attention.forward(sizes([4])) == 4 * 8 * 10
    assert attention.count_training(sizes([4])) == 12 * 8 * 10, "PaLM's 12, over the half that a causal mask leaves"


def test_a_window_bounds_the_keys_that_a_query_sees() -> None:
    assert sizes([5]).pairs(window=2) == 1 + 2 + 2 + 2 + 2
    assert sizes([2], [3]).pairs(window=2) == 2 + 2
    assert sizes([3]).pairs(window=8) == 1 + 2 + 3


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    flops = ModelFlops(layer_weights=100, head_weights=10, attention={FULL: 4}, adapter_weights=7)
    assert flops.count_training(sizes([2], head_rows=1)) == 4 * (100 * 2 + 10) + 6 * 7 * 2 + 3 * 4 * 3


def test_a_mixture_counts_the_experts_that_a_token_is_sent_to() -> None:
    footprint = footprint_of_shape(QWEN3_30B_A3B)
    assert footprint.num_parameters == pytest.approx(30.5e9, rel=0.005), "as on its model card"
    embedding = QWEN3_30B_A3B.vocab_size * QWEN3_30B_A3B.hidden_size
    assert footprint.matrix_weights + embedding == pytest.approx(3.3e9, rel=0.02), "as on its model card"
    norms_of_heads = 2 * 48  # which no shape declares
    assert footprint.num_tensors + footprint.num_expert_tensors + norms_of_heads == 18867, "as it is sent to vLLM"


def test_a_mixture_in_a_directory_has_the_sizes_of_its_shape(tmp_path: Path) -> None:
    config = small_config(Qwen3MoeConfig, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
    config.save_pretrained(tmp_path)
    shape = ModelShape(
        num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=128,
        context_tokens=1024, num_experts=8, experts_per_token=2, moe_intermediate_size=48,
    )  # fmt: skip
    found, declared = read_footprint(str(tmp_path)), footprint_of_shape(shape)
    assert found.active_layer_weights == declared.active_layer_weights
    assert found.attention_flops == declared.attention_flops
    norms_of_heads = 2 * 2 * 32  # which no shape declares
    assert found.num_parameters == declared.num_parameters + norms_of_heads
    assert found.num_tensors == declared.num_tensors + 2 * 2
    assert found.num_expert_tensors == declared.num_expert_tensors == 2 * 8 * 3
    assert found.linear_widths == declared.linear_widths
    assert found.linear_weights == declared.linear_weights
    assert found.num_key_heads == declared.num_key_heads == 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [({}, {FULL: 2 * 512}),
     ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, {FULL: 512, 4: 512})],
)  # fmt: skip
def test_layers_with_a_window_are_found(more: dict[str, object], expected: dict[int, int], tmp_path: Path) -> None:
    small_config(**more).save_pretrained(tmp_path)
    assert read_footprint(str(tmp_path)).attention_flops == expected


MIXTURE = small_config(Qwen3MoeConfig, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48)
OF_A_PAIR = 2 * 4 * 4 * 32  # layers x heads x 4 x head size


@pytest.fixture
def counted_attention() -> Iterator[None]:
    """Attention as plain products: torch counts no fused attention on CPUs."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.parametrize("config", [small_config(), MIXTURE], ids=["dense", "mixture"])
def test_torch_counts_the_same_while_a_model_computes(
    config: PretrainedConfig, counted_attention: None, tmp_path: Path
) -> None:
    """Two samples in one call of attention: as plain products it computes the whole square of each."""
    config.save_pretrained(tmp_path)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
    ids_T, lengths_S = torch.randint(0, 128, (48,)), torch.tensor([24, 24])
    positions_T = torch.arange(24).repeat(2)
    wanted_T = positions_T >= 12
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        compute_packed_logprobs(model, ids_T, positions_T, lengths_S, wanted_T=wanted_T)
    with FlopCounterMode(display=False) as both:
        compute_packed_logprobs(model, ids_T, positions_T, lengths_S, wanted_T=wanted_T).logprobs_T.sum().backward()
    flops = read_footprint(str(tmp_path)).flops(LoraConfig())
    packed = PackedSizes(lengths_S=[24, 24], prefixes_S=[0, 0], head_rows=24)
    masked = (2 * 24 * 24 - packed.pairs()) * OF_A_PAIR
    assert forward.get_total_flops() == flops.forward(packed) + masked
    assert both.get_total_flops() == flops.count_training(packed) + 3 * masked


def test_a_shared_prompt_passes_the_layers_once(counted_attention: None, tmp_path: Path) -> None:
    small_config().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(small_config(), attn_implementation=PACKED_ATTENTION)
    ids_T, lengths_S = torch.randint(0, 128, (32,)), torch.tensor([16, 16])
    prefixes = Prefixes(parents_S=torch.tensor([0, 0]), lengths_S=torch.tensor([0, 16]))
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        compute_packed_logprobs(model, ids_T, torch.arange(32), lengths_S, prefixes)
    flops = read_footprint(str(tmp_path)).flops(LoraConfig())
    packed = PackedSizes(lengths_S=[16, 16], prefixes_S=[0, 16], head_rows=31)  # nothing predicts the first token
    assert packed.pairs() == sum(range(1, 33)), "as of one sample of 32 tokens"
    padded = (2 * 16 * 32 - packed.pairs()) * OF_A_PAIR
    assert counted.get_total_flops() == flops.forward(packed) + padded
