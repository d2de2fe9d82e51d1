"""Weights rounded as quantized engines do: by hand, idempotent, and only the same matrices."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from grmpipe.models.lm.quantize import quantize_matrices, quantize_rows, quantize_rows_to_fp8


def test_a_row_is_rounded_to_steps_of_its_own_largest() -> None:
    """int4 has 7 steps to each side: of 0.7 a step is 0.1, of 14 it is 2."""
    weight = torch.tensor([[0.7, 0.33, -0.04], [-14.0, 6.9, 1.1], [0.0, 0.0, 0.0]])
    quantize_rows(weight, bits=4)
    torch.testing.assert_close(weight, torch.tensor([[0.7, 0.3, 0.0], [-14.0, 6.0, 2.0], [0.0, 0.0, 0.0]]))


def test_rounding_again_changes_nothing() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 96)
    for bits in (8, 4):
        quantize_rows(weight, bits)
        once = weight.clone()
        quantize_rows(weight, bits)
        torch.testing.assert_close(weight, once, rtol=1e-6, atol=0)


def test_a_row_in_fp8_has_16_steps_below_its_largest_and_finer_ones_below_half_of_it() -> None:
    """Of 448 the steps are 32 down to 256, then 16 down to 128."""
    weight = torch.tensor([[448.0, 430.0, 250.0, 7.1], [4.48, -4.30, 2.50, 0.0]])
    quantize_rows_to_fp8(weight)
    torch.testing.assert_close(weight, torch.tensor([[448.0, 416.0, 256.0, 7.0], [4.48, -4.16, 2.56, 0.0]]))


def test_fp8_errs_by_a_sixteenth_of_a_weight_at_most_and_again_by_nothing() -> None:
    torch.manual_seed(0)
    before = torch.randn(8, 4, 96)
    once = before.clone()
    quantize_rows_to_fp8(once)
    assert 0.05 < ((once - before).abs() / before.abs().clamp_min(1e-2)).max() <= 1 / 16 + 1e-4
    twice = once.clone()
    quantize_rows_to_fp8(twice)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


def test_int8_errs_by_half_a_step_at_most() -> None:
    torch.manual_seed(0)
    before = torch.randn(8, 4, 96)  # experts of an MoE: rows are treated alike
    after = before.clone()
    quantize_rows(after, bits=8)
    half_step = before.abs().amax(-1, keepdim=True) / 127 / 2
    assert 0 < ((after - before).abs() / half_step).max() <= 1 + 1e-4


def test_embedding_head_and_norms_stay_as_they_are() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Qwen3Config(vocab_size=64, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, **sizes)
    model = Qwen3ForCausalLM(config)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    quantize_matrices(model, "int4")
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")} and len(changed) == 7
