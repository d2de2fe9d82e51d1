"""Divided experts on one rank compute what transformers computes; several ranks are tested with the learner."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import (
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

from grmpipe.models.lm.parallel.expert_parallel import choose_sharded_dimension, divide_experts, find_experts
from grmpipe.models.lm.parallel.ranks import join_ranks

SHAPE = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "num_experts_per_tok": 2, "initializer_range": 0.3}  # fmt: skip
SPARSE = {"num_experts": 4, "moe_intermediate_size": 8}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen 3": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **SPARSE, head_dim=8)),
    "qwen 2": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SHAPE, **SPARSE, shared_expert_intermediate_size=8)),
    "olmoe": lambda: OlmoeForCausalLM(
        OlmoeConfig(**SHAPE, num_experts=4, intermediate_size=8, hidden_act="gelu", pad_token_id=None)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, intermediate_size=8)),
}


def one_rank(model: PreTrainedModel) -> None:
    join_ranks(0, 1, None, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("efsdp", "ep"))
    divide_experts(model, mesh, MixedPrecisionPolicy())


def one_pass(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(torch.arange(20)[None]).logits
    logits.square().mean().backward()
    return logits, {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_and_gradients_are_those_of_transformers(family: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    model.set_experts_implementation("eager")
    torch.manual_seed(0)
    divided = FAMILIES[family]().eval()
    one_rank(divided)
    (expected, gradients), (logits, found) = one_pass(model), one_pass(divided)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        assert gradient.any(), f"{name} has nothing to compare"
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_a_rank_that_no_token_reaches_has_gradients_of_zero() -> None:
    """A gradient that is None would keep FSDP2 from its reduction, for which the other ranks wait."""
    torch.manual_seed(0)
    model = FAMILIES["qwen 3"]().eval()
    one_rank(model)
    ((_, experts),) = find_experts(model)
    nothing_TH = torch.zeros((0, 16), requires_grad=True)
    out = experts(nothing_TH, torch.zeros((0, 2), dtype=torch.int64), torch.zeros((0, 2)))
    assert out.shape == (0, 16)
    out.sum().backward()
    for parameter in experts.parameters():
        assert not whole(parameter.grad).any()


def test_experts_are_sharded_along_a_dimension_that_divides_evenly() -> None:
    """Qwen3-30B-A3B on 24 ranks with ep=8: three ranks divide 1536 rows, and 768 columns where there are 2048 rows."""
    assert choose_sharded_dimension((16, 1536, 2048), 3) == 1
    assert choose_sharded_dimension((16, 2048, 768), 3) == 2
    with pytest.raises(ValueError, match=r"^ep: 5 ranks .* \(2048 x 768\) .*another ep$"):
        choose_sharded_dimension((16, 2048, 768), 5)


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^ep: a 'qwen3' model has no experts"):
        one_rank(Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "intermediate_size": 8})))
