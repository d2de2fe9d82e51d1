"""Families whose tensors an engine can't get under names that it knows are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from grmpipe.config.io.yaml_io import config_of
from grmpipe.config.roles import Model, resolve_roles
from grmpipe.config.run_config import ConfigError
from grmpipe.validate.weights import check_weight_names
from models.lm import checkpoint_names
from scheduler.placement import Placement


def check(path: Path, engine: str) -> None:
    config = config_of({"cluster": {"kind": "inprocess"}, "policy": {"engine": engine}})
    role = resolve_roles(config, Placement(pools={}, seats={})).served["policy"]
    # type: ignore[arg-type]
    check_weight_names(Model(name="policy", path=str(path), renderer=None, context_tokens=64), role)


def test_a_family_that_only_the_embedded_engine_can_be_sent_is_refused_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Qwen3MoeConfig(
        hidden_size=16, num_hidden_layers=1, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        vocab_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8, architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    check(tmp_path, "vllm")
    monkeypatch.setattr(
        checkpoint_names, "revert_weight_conversion", lambda model, state: {"x": next(iter(state.values()))}
    )
    with pytest.raises(
        ConfigError, match=r"^policy\.engine: the weights of a 'qwen3_moe' model .* type engine=embedded"
    ):
        check(tmp_path, "sglang")
    check(tmp_path, "embedded")
