"""Routers in float32 within a model in bfloat16: their product isn't rounded, everything else is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grmpipe.models.lm.moe.expert_routing import Routers, find_routers
from grmpipe.models.lm.parallel.expert_parallel import find_experts
from grmpipe.models.lm.parallel.ranks import join_ranks
from grmpipe.models.lm.parallelize import CAUSAL_LM, Architecture, load_parallel

CPU = torch.device("cpu")
IN_FLOAT32 = Architecture(load=CAUSAL_LM.load, outline=CAUSAL_LM.outline, fp32_router=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
    )  # fmt: skip
    Qwen3MoeForCausalLM(shape).save_pretrained(directory)
    return str(directory)


def one_pass(path: str, architecture: Architecture) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A model after a forward and backward pass; what its router and its experts saw."""
    model = load_parallel(path, join_ranks(0, 1, None, CPU), CPU, "float32", "bfloat16", architecture=architecture)
    (router,), ((_, experts),) = find_routers(model).values(), find_experts(model)
    seen: dict[str, Tensor] = {}
    router.register_forward_hook(
        lambda module, inputs, out: seen.update(tokens=inputs[0], logits=out[0], weight=whole(module.weight))
    )
    experts.register_forward_pre_hook(lambda module, inputs: seen.update(hidden=inputs[0], gates=inputs[2]))
    ids = torch.arange(12)[None]
    packed = {"position_ids": ids, "use_cache": False}
    model(input_ids=ids, attention_mask=None, **packed).logits.float().square().mean().backward()
    return model, seen


def whole(weight: Tensor) -> Tensor:
    """As gathered for a pass; FSDP2 has put the shards back when the hook runs."""
    return weight.detach().full_tensor().clone() if isinstance(weight, DTensor) else weight.detach().clone()


def test_only_the_router_computes_in_float32(path: str) -> None:
    model, seen = one_pass(path, IN_FLOAT32)
    assert seen["logits"].dtype == seen["weight"].dtype == torch.float32
    assert seen["hidden"].dtype == seen["gates"].dtype == torch.bfloat16
    exact = seen["hidden"].double() @ seen["weight"].double().T
    torch.testing.assert_close(seen["logits"].double(), exact, atol=1e-6, rtol=1e-5)
    gate = model.get_parameter("model.layers.0.mlp.gate.weight")
    assert gate.grad is not None and bool(gate.grad.full_tensor().any())  # type: ignore[attr-defined]


def test_its_routers_can_still_be_observed_and_replayed(path: str) -> None:
    """FSDP2 changes the class of what it shards."""
    model, _ = one_pass(path, IN_FLOAT32)
    assert Routers.find_in(model) is not None and Routers.of(model).shape.num_experts == 4
    with Routers.of(model).replay(torch.zeros((12, 1, 2), dtype=torch.int64)) as replay:
        model(input_ids=torch.arange(12)[None], position_ids=torch.arange(12)[None], use_cache=False)
    assert replay.rerouted_TL.any()


def test_without_it_the_product_is_rounded(path: str) -> None:
    _, seen = one_pass(path, CAUSAL_LM)
    assert seen["logits"].dtype == torch.bfloat16
