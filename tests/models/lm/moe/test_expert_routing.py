"""Experts recorded and replayed: only the choice is fixed, in every family with known routers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grmpipe.models.lm.causal_lm import load_causal_lm, outline_causal_lm
from grmpipe.models.lm.moe.expert_routing import ROUTERS, Routers
from grmpipe.models.types import ANY_EXPERT
from grmpipe.tiny.tokenizer import build_tokenizer
from grmpipe.tiny.upcycle import upcycle

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.2,
}  # fmt: skip
SPARSE = {"num_experts": 8, "moe_intermediate_size": 16}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen 2": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SHAPE, **SPARSE, shared_expert_intermediate_size=16, norm_topk_prob=False)
    ),
    "qwen 3": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **SPARSE, head_dim=8, norm_topk_prob=True)),
    "qwen 3, gates as they are": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, **SPARSE, head_dim=8, norm_topk_prob=False)
    ),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SHAPE, num_experts=8, pad_token_id=0)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=8)),
}
TOKEN_IDS = torch.tensor([[5, 3, 8, 2, 9, 4, 6], [7, 1, 3, 3, 60, 2, 0]])


def random_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[name]().eval()


def own_experts(model: nn.Module, routers: Routers) -> tuple[Tensor, Tensor]:
    """Logits, and the chosen experts."""
    with torch.no_grad(), routers.record_routing() as recording:
        logits: Tensor = model(TOKEN_IDS).logits
    return logits, recording.experts_TLK


def test_all_known_routers_are_tried() -> None:
    tried = {type(module).__name__ for name in FAMILIES for module in random_model(name).modules()}
    assert tried >= ROUTERS.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_models_own_choice_replayed_changes_no_bit(name: str) -> None:
    model = random_model(name)
    routers = Routers.of(model)
    assert (routers.shape.layers, routers.shape.top_k, routers.shape.num_experts) == ((0, 1, 2), 2, 8)
    logits, experts_TLK = own_experts(model, routers)
    assert experts_TLK.shape == (TOKEN_IDS.numel(), 3, 2) and len(experts_TLK.unique()) > 4
    with torch.no_grad(), routers.replay(experts_TLK) as replay:
        assert torch.equal(model(TOKEN_IDS).logits, logits)
    assert not replay.rerouted_TL.any()


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_go_where_they_are_sent_and_gates_learn(name: str) -> None:
    """Each expert replaced by the next but one: all tokens go elsewhere; gates are the routers' own, and so is the
    gradient.
    """
    model = random_model(name)
    routers = Routers.of(model)
    logits, experts_TLK = own_experts(model, routers)
    elsewhere_TLK = (experts_TLK + 2) % 8
    with routers.replay(elsewhere_TLK) as replay, routers.record_routing() as recording:
        replayed = model(TOKEN_IDS).logits
        replayed.square().sum().backward()
    assert torch.equal(recording.experts_TLK, elsewhere_TLK) and replay.rerouted_TL.float().mean() > 0.5
    assert (replayed - logits).abs().max() > 1e-2
    gates = [parameter for path, parameter in model.named_parameters() if path.endswith("mlp.gate.weight")]
    assert len(gates) == 3 and all(gate.grad is not None and gate.grad.abs().max() > 0 for gate in gates)
    with torch.no_grad():
        assert torch.equal(model(TOKEN_IDS).logits, logits), "no hook stays behind"


def test_the_gates_of_replayed_experts_are_what_the_router_would_give_them() -> None:
    """By hand: softmax over all experts, normalised over the two."""
    model = random_model("qwen 3")
    block = model.model.layers[0].mlp
    x_TC, chosen_TLK = torch.randn(6, 32), torch.tensor([[1, 5], [0, 7], [3, 2], [6, 4], [5, 1], [2, 0]])[:, None]
    routers = Routers([block.gate], Routers.of(model).shape)
    with torch.no_grad(), routers.replay(chosen_TLK):
        found_TC = block(x_TC[None])[0]
        probs_TE = (x_TC @ block.gate.weight.T).softmax(-1)
        for x_C, probs_E, chosen_K, found_C in zip(x_TC, probs_TE, chosen_TLK[:, 0], found_TC, strict=True):
            expected_C = torch.zeros(32)
            for expert in chosen_K.tolist():
                gate, up = (block.experts.gate_up_proj[expert] @ x_C).chunk(2)
                out_C = block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                expected_C += probs_E[expert] / probs_E[chosen_K].sum() * out_C
            torch.testing.assert_close(found_C, expected_C, atol=1e-5, rtol=1e-4)


def test_where_no_expert_is_known_the_router_chooses() -> None:
    model = random_model("mixtral")
    routers = Routers.of(model)
    logits, experts_TLK = own_experts(model, routers)
    with torch.no_grad(), routers.replay(torch.full_like(experts_TLK, ANY_EXPERT)):
        assert torch.equal(model(TOKEN_IDS).logits, logits)
    mixed_TLK = (experts_TLK + 2) % 8
    mixed_TLK[7:] = ANY_EXPERT  # the second text
    with torch.no_grad(), routers.replay(mixed_TLK.to(torch.int16)):
        first, second = model(TOKEN_IDS).logits
    torch.testing.assert_close(second, logits[1])
    assert (first - logits[0]).abs().max() > 1e-2


def test_layers_without_experts_have_no_place() -> None:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **SPARSE, head_dim=8, mlp_only_layers=[1]))
    routers = Routers.of(model)
    assert routers.shape.layers == (0, 2)
    assert own_experts(model, routers)[1].shape == (TOKEN_IDS.numel(), 2, 2)


def test_a_dense_model_is_refused_by_the_name_of_the_key() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 8}))
    with pytest.raises(ValueError, match=r"^router_replay: Qwen3ForCausalLM has no router.*type algorithm\."):
        Routers.of(model)


def test_routers_that_are_not_known_are_refused_by_name() -> None:
    class StrangeTopKRouter(nn.Module): ...

    with pytest.raises(ValueError, match=r"^router_replay: the experts of StrangeTopKRouter can't be replayed"):
        Routers.of(nn.ModuleList([StrangeTopKRouter()]))


def test_a_mixture_made_of_a_dense_model_is_that_model_until_its_experts_are_moved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    shape = {**SHAPE, "vocab_size": len(tokenizer), "head_dim": 8, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "same", noise=0.0)
    upcycle(tmp_path / "dense", tmp_path / "moved")
    with torch.no_grad():
        dense, same, moved = (
            load_causal_lm(str(tmp_path / name))(TOKEN_IDS).logits for name in ("dense", "same", "moved")
        )
    torch.testing.assert_close(same, dense, atol=1e-4, rtol=1e-4)
    assert (moved - dense).abs().max() > 0.1
    assert Routers.of(outline_causal_lm(str(tmp_path / "moved"))).shape.num_experts == 8
    assert AutoTokenizer.from_pretrained(tmp_path / "moved").chat_template == tokenizer.chat_template
