"""Packed log-probs equal the log-probs of each sample alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grmpipe.models.lm.causal_lm import compute_packed_logprobs, load_causal_lm

LENGTHS = [7, 1, 12, 4]


def tiny_config(**changes: object) -> Qwen3Config:
    return Qwen3Config(
        **{
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
            "tie_word_embeddings": True, **changes,
        }
    )  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    Qwen3ForCausalLM(tiny_config()).save_pretrained(tmp_path)
    return load_causal_lm(str(tmp_path))


def test_weights_that_lack_tensors_or_have_other_shapes_are_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    values = load_file(tmp_path / "model.safetensors")
    del values["model.layers.1.mlp.up_proj.weight"]
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lack 1 tensors of the model, such as model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_causal_lm(str(tmp_path))
    tiny_config(intermediate_size=48).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^path: .* other shapes than its config\.json says"):
        load_causal_lm(str(tmp_path))


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(64, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([torch.arange(length) for length in lengths]), torch.tensor(lengths)


def one_by_one(model: PreTrainedModel, ids: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain forward pass of transformers, one sample at a time."""
    logprobs, entropy = [], []
    for sample in ids.split(lengths):
        log_softmax = model(input_ids=sample[None]).logits[0, :-1].log_softmax(-1)
        zero = torch.zeros(1)
        logprobs.append(torch.cat([zero, log_softmax.gather(-1, sample[1:, None])[:, 0]]))
        entropy.append(torch.cat([zero, -(log_softmax.exp() * log_softmax).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropy)


def test_packed_equals_one_by_one(model: PreTrainedModel) -> None:
    ids, positions, lengths = packed(LENGTHS)
    ours = compute_packed_logprobs(model, ids, positions, lengths, want_entropy=True)
    logprobs, entropy = one_by_one(model, ids, LENGTHS)
    torch.testing.assert_close(ours.logprobs_T, logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.entropy_T, entropy, atol=1e-5, rtol=0)


def test_a_mixture_whose_config_asks_for_router_logits_has_no_balancing_loss(tmp_path: Path) -> None:
    """transformers computes it from a mask with a row per sample, and packed samples have none."""
    torch.manual_seed(0)
    shape = {**tiny_config().to_dict(), "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 16, "output_router_logits": True}  # fmt: skip
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).save_pretrained(tmp_path)
    mixture = load_causal_lm(str(tmp_path))
    ids, positions, lengths = packed(LENGTHS)
    expected, _ = one_by_one(mixture, ids, LENGTHS)
    torch.testing.assert_close(
        compute_packed_logprobs(mixture, ids, positions, lengths).logprobs_T, expected, atol=1e-5, rtol=0
    )


def test_gradients_of_packed_equal_one_by_one(model: PreTrainedModel) -> None:
    ids, positions, lengths = packed(LENGTHS)
    compute_packed_logprobs(model, ids, positions, lengths).logprobs_T.sum().backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    one_by_one(model, ids, LENGTHS)[0].sum().backward()
    for mine, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-4, rtol=1e-4)


def test_a_sliding_window_is_kept_within_samples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny_config(use_sliding_window=True, sliding_window=3, max_window_layers=0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path))
    assert set(model.config.layer_types) == {"sliding_attention"}
    ids, positions, lengths = packed(LENGTHS)
    ours = compute_packed_logprobs(model, ids, positions, lengths).logprobs_T
    torch.testing.assert_close(ours, one_by_one(model, ids, LENGTHS)[0], atol=1e-5, rtol=0)


def test_unwanted_tokens_are_zero_and_change_nothing(model: PreTrainedModel) -> None:
    ids, positions, lengths = packed(LENGTHS)
    wanted = torch.arange(len(ids)) % 3 == 0
    some = compute_packed_logprobs(model, ids, positions, lengths, want_entropy=True, wanted_T=wanted)
    every = compute_packed_logprobs(model, ids, positions, lengths, want_entropy=True)
    torch.testing.assert_close(some.logprobs_T, every.logprobs_T * wanted)
    torch.testing.assert_close(some.entropy_T, every.entropy_T * wanted)


def test_temperature_divides_the_logits(model: PreTrainedModel) -> None:
    ids, positions, lengths = packed([5])
    ours = compute_packed_logprobs(model, ids, positions, lengths, temperature=0.5).logprobs_T
    expected = (2 * model(input_ids=ids[None]).logits[0, :-1]).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(ours[1:], expected)


def test_a_left_padded_batch_still_goes_through_the_model(model: PreTrainedModel) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1, 2]])
    padded = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[0, 2:]
    torch.testing.assert_close(padded, model(input_ids=ids[:, 2:]).logits[0])


def test_a_missing_directory_is_named() -> None:
    with pytest.raises(ValueError, match="no directory"):
        load_causal_lm("./nowhere")


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ValueError, match="not a causal language model"):
        load_causal_lm(str(tmp_path))


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="can't be loaded"):
        load_causal_lm(str(tmp_path))
