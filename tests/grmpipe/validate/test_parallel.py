"""Ranks that can't be grouped as configured, and models without experts to divide, are refused before the start."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import MixtralConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.yaml_io import from_values
from grmpipe.validate.parallel import check_experts

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
         "vocab_size": 32, "intermediate_size": 32}  # fmt: skip


def divided(ep: int) -> RunConfig:
    return from_values(RunConfig, {"cluster": {"kind": "inprocess"}, "train": {"parallel": {"ep": ep}}})


def test_a_dense_model_has_no_experts_to_divide(tmp_path: Path) -> None:
    Qwen3Config(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^train\.parallel\.ep: a 'qwen3' model .* type train\.parallel\.ep=1"):
        check_experts(divided(2), str(tmp_path))
    check_experts(divided(1), str(tmp_path))


def test_ranks_divide_experts_evenly(tmp_path: Path) -> None:
    Qwen3MoeConfig(**SMALL, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8).save_pretrained(tmp_path)
    check_experts(divided(3), str(tmp_path))
    with pytest.raises(ConfigError, match=r"^train\.parallel\.ep: 4 ranks can't divide 6 experts"):
        check_experts(divided(4), str(tmp_path))
    MixtralConfig(**SMALL, num_local_experts=4).save_pretrained(tmp_path)
    check_experts(divided(4), str(tmp_path))


def test_families_with_other_experts_are_refused_by_name(tmp_path: Path) -> None:
    shape = {**SMALL, "n_routed_experts": 4, "moe_intermediate_size": 8, "first_k_dense_replace": 0}
    CONFIG_MAPPING["glm4_moe"](**shape).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^train\.parallel\.ep: .*'glm4_moe' .*\(Glm4MoeExperts\).*MixtralExperts"):
        check_experts(divided(2), str(tmp_path))
