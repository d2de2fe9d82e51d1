"""Slots that are certainly too small are refused before a run starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.plan.memory_check import check_memory, collect_known
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import ConfigError
from grmpipe.models.lm.footprint import read_footprint
from grmpipe.run.prepare import prepare
from grmpipe.tiny.resolve import SHIPPED

ROOT = Path(__file__).parents[4]
WEIGHTS_MB = read_footprint(str(SHIPPED / "policy")).weight_bytes("float32") / 1e6


def checked(*overrides: str) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = build(compose("config", list(overrides)))
    check_memory(collect_known(prepare(config)))


def test_an_elastic_pool_holds_its_roles_at_once_where_engines_cannot_sleep() -> None:
    """Two engines' weights, and the learner's weights, gradients and moments: six times the model on one slot."""
    elastic = ("+experiment=quickstart", "placement=elastic")
    checked(*elastic, f"placement.pools.engines.memory_gb={6.2 * WEIGHTS_MB / 1e3}")
    with pytest.raises(ConfigError, match=r"^placement\.pools\.engines\.memory_gb: cpu slot 0 has .* GB, ") as told:
        checked(*elastic, f"placement.pools.engines.memory_gb={5.8 * WEIGHTS_MB / 1e3}")
    assert re.search(
        r"\(policy 1\.48 MB, learner 5\.93 MB, grm 1\.48 MB\); give the roles separate pools", str(told.value)
    )


def test_a_critic_wants_as_much_as_a_learner() -> None:
    with pytest.raises(ConfigError, match=r"^placement\.pools\.judging\.memory_gb: .* critic 5\.93 MB"):
        checked("+experiment=ppo", f"placement.pools.judging.memory_gb={4.9 * WEIGHTS_MB / 1e3}")


def test_room_that_depends_on_lengths_is_no_refusal() -> None:
    """Keys and values of 256 rows, and activations, would need a hundred times as much."""
    checked("+experiment=quickstart", f"placement.pools.train.memory_gb={5.2 * WEIGHTS_MB / 1e3}")
