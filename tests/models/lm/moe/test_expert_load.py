"""The balance of a mixture's load, by numbers worked out by hand, and what a pass counts."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grmpipe.models.lm.moe.expert_load import ExpertLoad, LoadBalance
from grmpipe.models.lm.moe.expert_routing import Routers
from grmpipe.models.lm.parallel.ranks import join_ranks

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32}  # fmt: skip


@pytest.fixture(scope="module")
def mixture() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    return Qwen3MoeForCausalLM(config).eval()


def test_load_balance_equals_its_formulas() -> None:
    """Two layers of four experts, 8 tokens to 1 expert each: mean load 2; one layer is even, one uses half of them."""
    load_LE = torch.tensor([[2.0, 2, 2, 2], [6, 2, 0, 0]])
    balance = LoadBalance.of(load_LE, torch.tensor([8 * math.log(4), 0.0]), 8)
    assert balance.max_violation == pytest.approx((0 + 2) / 2)
    assert balance.worst_max_violation == pytest.approx(2)
    assert balance.unused_share == pytest.approx(2 / 8)
    assert balance.router_entropy == pytest.approx(math.log(4) / 2)


def test_a_pass_counts_the_experts_that_a_replay_chose(mixture: PreTrainedModel) -> None:
    join_ranks(0, 1, None, CPU)
    routers = Routers.of(mixture)
    ids = torch.arange(10)[None]
    own, replayed = ExpertLoad(routers, CPU), ExpertLoad(routers, CPU)
    with torch.no_grad(), own.count_experts():
        mixture(ids)
    everyone_to_two_TLK = torch.tensor([1, 3]).expand(10, 2, 2)
    with torch.no_grad(), routers.replay(everyone_to_two_TLK), replayed.count_experts():
        mixture(ids)
    balance = replayed.read()
    assert balance.max_violation == balance.worst_max_violation == 1.0, "10 tokens each, of 5 on average"
    assert balance.unused_share == 0.5
    assert own.read().unused_share < 0.5
    assert 0 < balance.router_entropy <= math.log(4)


def test_passes_outside_do_not_count_and_several_inside_add_up(mixture: PreTrainedModel) -> None:
    join_ranks(0, 1, None, CPU)
    load, twice = (ExpertLoad(Routers.of(mixture), CPU) for _ in range(2))
    ids = torch.arange(10)[None]
    with torch.no_grad():
        with load.count_experts():
            mixture(ids)
        mixture(ids + 7)
        for _ in range(2):
            with twice.count_experts():
                mixture(ids)
    assert load.read() == twice.read()


def test_a_dense_model_has_no_load() -> None:
    assert Routers.find_in(Qwen3ForCausalLM(Qwen3Config(**SHAPE))) is None
