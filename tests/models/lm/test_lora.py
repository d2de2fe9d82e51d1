"""Adapters: their outputs, merged or separate, in a learner's model and an engine's; what is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grmpipe.models.engines.embedded.decoder import open_decoder
from grmpipe.models.engines.embedded.fused_decoder import FusedDecoder
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.checkpoint import export_hf
from grmpipe.models.lm.lora import ADAPTER, adapters, add_adapters, check_targets, list_outgoing, without_adapters
from grmpipe.models.settings import LoraConfig
from grmpipe.models.types import WeightBucket
from grmpipe.models.weights.object_store import ObjectStore
from grmpipe.models.weights.receive_tensors import WeightInbox
from grmpipe.models.weights.weight_stream import WeightStream

IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])
ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
        )
    ).save_pretrained(directory)  # fmt: skip
    return str(directory)


def lora(**options: object) -> LoraConfig:
    return LoraConfig(rank=4, alpha=8.0, **options)  # type: ignore[arg-type]


@torch.no_grad()
def trained(path: str, config: LoraConfig, seed: int = 0) -> PreTrainedModel:
    """Adapters as after some steps: B is no longer 0."""
    model = add_adapters(load_causal_lm(path), {ADAPTER: config}, "float32")
    generator = torch.Generator().manual_seed(seed)
    for _, low_rank in adapters(model):
        low_rank.b_OR.copy_(torch.randn(low_rank.b_OR.shape, generator=generator) * 0.3)
    return model


@torch.no_grad()
def logprobs(model: nn.Module) -> Tensor:
    return model(IDS).logits.log_softmax(-1)


def buckets(model: nn.Module, config: LoraConfig, fixed: bool = True) -> Iterator[WeightBucket]:
    stream, store = (
        WeightStream(model, "float32", 1 << 14, list_outgoing(model, config, "float32")),
        ObjectStore("float32"),
    )
    for index in range(0 if fixed else stream.num_fixed_buckets, stream.num_buckets):
        yield store.post(index, stream.unshard_bucket(index))


def pushed(target: PreTrainedModel, sent: Iterator[WeightBucket]) -> int:
    """Bytes."""
    inbox, num_bytes = WeightInbox(target, torch.device("cpu")), 0
    with torch.no_grad():
        for bucket in sent:
            inbox.load(bucket)
            num_bytes += sum(4 * torch.Size(tensor.shape).numel() for tensor in bucket.tensors)
    return num_bytes


def test_new_adapters_change_nothing_and_are_the_same_every_time(path: str) -> None:
    first, second = (add_adapters(load_causal_lm(path), {ADAPTER: lora()}, "float32") for _ in range(2))
    torch.testing.assert_close(logprobs(first), logprobs(load_causal_lm(path)), atol=0, rtol=0)
    for (_, one), (_, other) in zip(adapters(first), adapters(second), strict=True):
        assert one.a_RI.abs().max() > 0 and torch.equal(one.a_RI, other.a_RI)


def test_another_seed_gives_other_adapters(path: str) -> None:
    first, second = (add_adapters(load_causal_lm(path), {ADAPTER: lora()}, "float32", seed) for seed in (0, 1))
    for (_, one), (_, other) in zip(adapters(first), adapters(second), strict=True):
        assert not torch.equal(one.a_RI, other.a_RI)


def test_only_adapters_learn(path: str) -> None:
    model = trained(path, lora())
    learning = {id(p) for p in model.parameters() if p.requires_grad}
    assert learning == {id(p) for _, low_rank in adapters(model) for p in (low_rank.a_RI, low_rank.b_OR)}
    assert len(learning) == 2 * 2 * len(ALL)  # A and B, two blocks


def test_a_model_without_its_adapters_is_the_one_that_was_loaded(path: str) -> None:
    model, plain = trained(path, lora()), logprobs(load_causal_lm(path))
    before = logprobs(model)
    with without_adapters(model):
        torch.testing.assert_close(logprobs(model), plain, atol=0, rtol=0)
        assert all(p.requires_grad for _, low_rank in adapters(model) for p in (low_rank.a_RI, low_rank.b_OR))
    torch.testing.assert_close(logprobs(model), before, atol=0, rtol=0)
    assert (before - plain).abs().max() > 0.01


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"]])
def test_merged_weights_say_what_adapters_say(path: str, targets: list[str]) -> None:
    """In a plain engine's model, and in one with its own adapters."""
    model = trained(path, lora(target_modules=targets))
    plain = load_causal_lm(path)
    pushed(plain, buckets(model, lora()))
    own = add_adapters(load_causal_lm(path), {ADAPTER: lora(target_modules=targets)}, "float32")
    pushed(own, buckets(model, lora(sync="adapters")))
    torch.testing.assert_close(logprobs(plain), logprobs(model), atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs(own), logprobs(model), atol=0, rtol=0)


def test_after_the_first_push_only_what_changes_is_sent(path: str) -> None:
    merged, alone = trained(path, lora()), lora(sync="adapters")
    everything, changing = (pushed(load_causal_lm(path), buckets(merged, lora(), fixed)) for fixed in (True, False))
    model = load_causal_lm(path)
    in_layers = sum(
        m.weight.nbytes for layer in model.model.layers for m in layer.modules() if isinstance(m, nn.Linear)
    )
    assert everything == sum(p.nbytes for p in model.parameters())
    assert changing == in_layers < everything
    own = add_adapters(load_causal_lm(path), {ADAPTER: alone}, "float32")
    sent = pushed(own, buckets(merged, alone))
    assert sent == sum(p.nbytes for p in own.parameters() if p.requires_grad)


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"], ["up_proj"]])
def test_the_fused_decoder_applies_adapters_that_a_push_brings(path: str, targets: list[str]) -> None:
    """Its token-by-token output equals the module's output for the whole text."""
    config = lora(target_modules=targets, sync="adapters")
    model = add_adapters(load_causal_lm(path), {ADAPTER: config}, "float32")
    decoder, slots = open_decoder(model, 2, 32)
    assert isinstance(decoder, FusedDecoder)
    before = logprobs(model)
    pushed(model, buckets(trained(path, config), config))
    slots.reserve(2, 32)
    ids = IDS[0].tolist()
    with torch.no_grad():
        decoder.prefill([ids[:3]], [0], adapters=[ADAPTER])
        for position in range(3, len(ids)):
            fed = torch.tensor([ids[position]]), torch.tensor([position])
            logits_BV = decoder.decode(*fed, position + 1, [ADAPTER])
            said = logits_BV[0].log_softmax(-1)
            torch.testing.assert_close(said, logprobs(model)[0, position], atol=1e-5, rtol=0)
    assert (logprobs(model) - before).abs().max() > 0.01


def test_an_export_is_a_plain_model_and_the_adapters_are_pefts(path: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model = trained(path, lora())
    export_hf(str(tmp_path / "policy"), model, path, lora(), str(tmp_path / "adapter"))
    plain = load_causal_lm(str(tmp_path / "policy"))
    torch.testing.assert_close(logprobs(plain), logprobs(model), atol=1e-5, rtol=0)
    assert plain.state_dict().keys() == load_causal_lm(path).state_dict().keys()
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), str(tmp_path / "adapter"))
    torch.testing.assert_close(logprobs(theirs), logprobs(model), atol=1e-5, rtol=0)


def test_a_target_that_is_not_there_is_named_with_those_that_are(path: str) -> None:
    with pytest.raises(ValueError, match=r"'qproj'; known: .*q_proj"):
        check_targets(path, lora(target_modules=["qproj"]))
    check_targets(path, lora(target_modules=ALL))


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="known: none"):
        check_targets(str(tmp_path), lora())


@pytest.mark.parametrize(
    ("values", "said"),
    [({"rank": -1}, "^rank: must be 0"), ({"alpha": 0.0}, "^alpha: "), ({"sync": "both"}, "^sync: .*merged, adapters")],
)
def test_a_bad_value_names_its_key(values: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LoraConfig(**values)
