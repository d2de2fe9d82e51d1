"""Log-probs computed in the output head equal those of whole logits, in families that return what their head does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from grmpipe.models.lm import causal_lm
from grmpipe.models.lm.causal_lm import compute_packed_logprobs, load_causal_lm, outline_causal_lm
from grmpipe.models.lm.output_head import OutputHead
from grmpipe.models.lm.packing import Prefixes
from grmpipe.models.lm.parallel.ranks import join_ranks
from grmpipe.models.lm.parallelize import load_parallel, without_gradient
from grmpipe.models.settings import Activations

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RETURNED: dict[str, dict[str, Any]] = {
    "qwen3": TINY | {"tie_word_embeddings": True},
    "llama": TINY,
    "phi": TINY,  # its head has a bias
    "qwen3_moe": TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma3_text": TINY,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}
CHANGED: dict[str, dict[str, Any]] = {
    "cohere": TINY,
    "granite": TINY | {"logits_scaling": 3.0},
    "gemma3_text": TINY | {"final_logit_softcapping": 2.0},
}
CPU = torch.device("cpu")


def saved(directory: Path, kind: str, options: dict[str, Any]) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    model.save_pretrained(directory)
    return str(directory)


def results(model: PreTrainedModel, **options: Any) -> list[Tensor | None]:
    """Log-probs, entropies and all gradients of two samples that share a prefix."""
    ids_T = torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(0))
    positions_T = torch.tensor([*range(12), *range(5, 13)])
    prefixes = Prefixes(parents_S=torch.tensor([0, 0]), lengths_S=torch.tensor([0, 5]))
    wanted_T = torch.arange(20) % 3 > 0
    model.zero_grad()
    out = compute_packed_logprobs(
        model, ids_T, positions_T, torch.tensor([12, 8]), prefixes, want_entropy=True, wanted_T=wanted_T,
        temperature=0.7, **options,
    )  # fmt: skip
    (out.logprobs_T.sum() + 2 * (out.entropy_T * torch.arange(20)).sum()).backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [out.logprobs_T.detach(), out.entropy_T.detach(), *grads]


@pytest.mark.parametrize(("kind", "is_found"), [*((k, True) for k in RETURNED), *((k, False) for k in CHANGED)])
def test_chunks_of_the_head_change_no_number_of_any_family(
    kind: str, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, kind, (RETURNED if is_found else CHANGED)[kind])
    model = load_causal_lm(path)
    heads = [model.get_output_embeddings(), outline_causal_lm(path).get_output_embeddings()]
    assert [isinstance(head, OutputHead) for head in heads] == [is_found, is_found]
    whole = results(model)
    monkeypatch.setattr(causal_lm, "CHUNK_LOGITS", 100)
    for ours, theirs in zip(results(model), whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_family_that_caps_its_logits_would_be_wrong_by_its_heads_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_causal_lm(saved(tmp_path, "granite", CHANGED["granite"]))
    (whole, *_), head = results(model), model.get_output_embeddings()
    monkeypatch.setattr(causal_lm, "CHUNK_LOGITS", 100)
    head.__class__ = OutputHead
    (ours, *_) = results(model)
    assert whole is not None and ours is not None and (ours - whole).abs().max() > 0.1


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_sharded_model_gathers_its_head_for_chunks(
    kind: str, checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, kind, RETURNED[kind])
    meshes = join_ranks(0, 1, None, CPU)
    whole = results(load_parallel(path, meshes, CPU, "float32", "float32"))
    monkeypatch.setattr(causal_lm, "CHUNK_LOGITS", 100)
    model = load_parallel(path, meshes, CPU, "float32", "float32", Activations(checkpointing=checkpointing))
    for _ in range(2):
        for ours, theirs in zip(results(model), whole, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        with without_gradient(model):
            compute_packed_logprobs(model, torch.arange(5, 25), torch.arange(20), torch.tensor([20]))


def test_a_float32_head_doesnt_round_its_logits(tmp_path: Path) -> None:
    model = load_causal_lm(saved(tmp_path, "llama", RETURNED["llama"]), "bfloat16")
    hidden: list[Tensor] = []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0].detach()))
    ids_T = torch.arange(5, 25)
    exact, rounded = (
        compute_packed_logprobs(model, ids_T, torch.arange(20), torch.tensor([20]), fp32_logits=fp32).logprobs_T[1:]
        for fp32 in (True, False)
    )
    log_softmax = (hidden[0][0].double() @ head.weight.double().t()).log_softmax(-1)
    expected = log_softmax.gather(-1, ids_T[1:, None]).squeeze(-1).float()
    torch.testing.assert_close(exact, expected, atol=1e-5, rtol=1e-5)
    assert (rounded - expected).abs().max() > 1e-3
