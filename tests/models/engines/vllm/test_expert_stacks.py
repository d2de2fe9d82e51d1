"""Tensors of experts joined before vLLM loads them: how many are left of a mixture, and those that don't come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm
META = torch.device("meta")


def name_experts(layer: int, number: int) -> list[str]:
    names = (f"model.layers.{layer}.mlp.experts.{e}.{one}_proj.weight" for e in range(number) for one in PROJECTIONS)
    return [*names, f"model.layers.{layer}.mlp.gate.weight"]


PROJECTIONS = ("gate", "up", "down")


def make_stacks(num_layers: int, num_experts: int) -> Any:
    from grmpipe.models.engines.vllm.expert_stacks import ExpertStacks

    return ExpertStacks(
        SimpleNamespace(layer_name=f"model.layers.{layer}.mlp.experts", global_num_experts=num_experts)
        for layer in range(num_layers)
    )


@pytest.mark.parametrize(("num_layers", "sent", "loaded"), [(48, 18432, 144), (94, 36096, 282)], ids=["30B", "235B"])
def test_a_mixtures_experts_are_three_tensors_a_layer(num_layers: int, sent: int, loaded: int) -> None:
    """Qwen3-30B-A3B and Qwen3-235B-A22B: 128 experts in each layer."""
    stacks, one = make_stacks(num_layers, 128), torch.empty(2, 2, device=META)
    names = [name for layer in range(num_layers) for name in name_experts(layer, 128)]
    handed = [found[0] for name in names if (found := stacks.join(name, one, META)) is not None]
    assert len(names) == sent + num_layers and len(handed) == loaded + num_layers, "and the routers"
    assert sum(map(len, stacks.members.values())) == sent
    stacks.refuse_incomplete()


def test_experts_in_any_order_are_at_their_places_and_missing_ones_are_refused() -> None:
    stacks, cpu = make_stacks(1, 4), torch.device("cpu")
    prefix = "model.layers.0.mlp.experts"
    found = [stacks.join(f"{prefix}.{n}.up_proj.weight", torch.full((2, 3), float(n)), cpu) for n in (2, 0, 3, 1)]
    assert found[:3] == [None] * 3
    assert found[3][0] == f"{prefix}.up_proj" and found[3][1][:, 0, 0].tolist() == [0, 1, 2, 3]
    stacks.join(f"{prefix}.1.down_proj.weight", torch.zeros(2, 3), cpu)
    with pytest.raises(ValueError, match=r"experts\.down_proj came for 1 of 4 experts; send all"):
        stacks.refuse_incomplete()
    stacks.clear()
    stacks.refuse_incomplete()
    other = "model.layers.7.mlp.experts.0.up_proj.weight"
    assert stacks.join(other, torch.zeros(1), cpu)[0] == other, "a layer whose experts are elsewhere"
