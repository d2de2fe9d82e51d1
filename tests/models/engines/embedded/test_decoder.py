"""For any architecture: the decoder's logits are the model's own, or the model is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grmpipe.models.engines.embedded.decoder import Decoder, ModuleDecoder, open_decoder
from grmpipe.models.engines.embedded.fused_decoder import FusedDecoder
from grmpipe.models.engines.embedded.kv_slots import KvSlots
from grmpipe.models.engines.embedded.prompt_packing import bin_by_length

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

BY_HAND = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=8)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama 3": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen 2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen 3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
}
AS_IT_IS = {
    "gpt 2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
    ),
    "dynamic rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=DYNAMIC_ROPE)),
    "gelu": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")),
}


def random_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = {**BY_HAND, **AS_IT_IS}[name]().eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or "bias" in parameter_name:  # ones and zeros would hide a mix-up
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


@torch.no_grad()
def logits_by_steps(decoder: Decoder, slots: KvSlots, texts: list[list[int]], num_prefilled: list[int]) -> torch.Tensor:
    """Prefill a part of each text, decode the rest in one batch. Returns the logits of the last step."""
    slots.reserve(len(texts), 32)
    decoder.prefill([ids[:cut] for ids, cut in zip(texts, num_prefilled, strict=True)], range(len(texts)))
    for step in range(3):
        positions = torch.tensor(num_prefilled) + step
        token_ids = torch.tensor([ids[position] for ids, position in zip(texts, positions.tolist(), strict=True)])
        logits = decoder.decode(token_ids, positions, int(positions.max()) + 1)
    return logits


@pytest.mark.parametrize("name", [*BY_HAND, *AS_IT_IS])
@torch.no_grad()
def test_logits_of_prefill_and_decoding_are_the_models_own(name: str) -> None:
    model = random_model(name)
    texts = [torch.randint(64, (length,)).tolist() for length in (14, 6, 9)]
    expected = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in texts])
    decoder, slots = open_decoder(model, max_rows=3, max_tokens=64)
    assert type(decoder) is (FusedDecoder if name in BY_HAND else ModuleDecoder)
    logits = logits_by_steps(decoder, slots, texts, [len(ids) - 3 for ids in texts])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama with biases", "qwen 3", "gpt 2"])
@torch.no_grad()
def test_logits_of_several_tokens_at_once_are_the_models_own(name: str) -> None:
    """The second row has fewer tokens than the first."""
    model = random_model(name)
    texts = [torch.randint(64, (length,)).tolist() for length in (14, 6)]
    decoder, slots = open_decoder(model, max_rows=2, max_tokens=64)
    slots.reserve(2, 32)
    decoder.prefill([ids[: len(ids) - num_fed] for ids, num_fed in zip(texts, (4, 2), strict=True)], range(2))
    fed_BQ = torch.tensor([texts[0][-4:], [*texts[1][-2:], *texts[1][-1:] * 2]])
    logits_BQV = decoder.verify(fed_BQ, torch.tensor([[10, 11, 12, 13], [4, 5, 5, 5]]), 14)
    for ids, logits_QV in zip(texts, (logits_BQV[0], logits_BQV[1, :2]), strict=True):
        expected = model(torch.tensor([ids])).logits[0, -len(logits_QV) :]
        torch.testing.assert_close(logits_QV, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_fused_weights_are_the_modules_own_memory() -> None:
    model = random_model("qwen 3")
    decoder, slots = open_decoder(model, max_rows=2, max_tokens=64)
    for parameter in model.parameters():
        parameter.mul_(0.5).add_(0.01)
    text = torch.randint(64, (10,)).tolist()
    expected = model(torch.tensor([text])).logits[0, -1]
    torch.testing.assert_close(logits_by_steps(decoder, slots, [text], [7])[0], expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_fused_decoder_that_is_wrong_gives_way_to_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedDecoder, "decode", lambda self, ids, positions, attended: torch.zeros(len(ids), 64))
    decoder, _ = open_decoder(random_model("llama"), max_rows=2, max_tokens=64)
    assert type(decoder) is ModuleDecoder


@torch.no_grad()
def test_decoders_are_tried_on_the_tokens_that_they_are_given(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Special tokens, which models see once in a text, are what 16 bits get wrong."""
    right = FusedDecoder.decode

    def wrong_on_special_tokens(self: FusedDecoder, ids: Tensor, positions: Tensor, attended: int) -> Tensor:
        return right(self, ids, positions, attended) * (1 if bool((ids >= 10).all()) else 0)

    monkeypatch.setattr(FusedDecoder, "decode", wrong_on_special_tokens)
    decoder, _ = open_decoder(random_model("llama"), max_rows=2, max_tokens=64, probe=((11, 12, 13), (21, 22)))
    assert type(decoder) is FusedDecoder and not caplog.records
    decoder, _ = open_decoder(random_model("llama"), max_rows=2, max_tokens=64, probe=((1, 2, 3), (2, 1)))
    assert type(decoder) is ModuleDecoder and "FusedDecoder: its logits differ" in caplog.text


@torch.no_grad()
def test_a_sliding_window_is_refused() -> None:
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)).eval()
    with pytest.raises(ValueError, match="full attention"):
        open_decoder(model, max_rows=2, max_tokens=64)


def test_slots_keep_what_they_hold_when_they_grow() -> None:
    _, slots = open_decoder(random_model("llama"), max_rows=64, max_tokens=64)
    slots.reserve(3, 10)
    slots.kv_NRT2GD[:, :3, :10] = held = torch.randn_like(slots.kv_NRT2GD[:, :3, :10])
    slots.reserve(40, 60)
    assert torch.equal(slots.kv_NRT2GD[:, :3, :10], held)
    assert slots.kv_NRT2GD.shape[1:3] >= (40, 60)


def test_a_long_prompt_never_pads_the_short_ones() -> None:
    lengths = [30, 6000, 62, 109, 4, 5900]
    groups = bin_by_length(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert [[lengths[index] for index in group] for group in groups] == [[4], [30], [62], [109], [5900, 6000]]


@torch.no_grad()
def test_fused_decoder_decodes_bfloat16() -> None:
    decoder, slots = open_decoder(random_model("qwen 3").bfloat16(), max_rows=2, max_tokens=64)
    assert type(decoder) is FusedDecoder
    assert slots.kv_NRT2GD.dtype == torch.bfloat16
