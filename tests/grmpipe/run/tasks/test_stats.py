"""What a run's statistics take from its configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from configs import judge_config, run_config

from grmpipe.config.grm import GrmConfig
from grmpipe.config.reward import RewardConfig
from grmpipe.config.run_sections import ClusterConfig
from grmpipe.models.settings import LoraConfig, PolicyConfig
from grmpipe.run.tasks.stats import read_setup
from grmpipe.scheduler.placement import PlacementConfig, PoolConfig, RoleConfig


def placement(slots: int, resource: str = "cpu") -> PlacementConfig:
    pools = {"all": PoolConfig(slots=slots, resource=resource)}
    return PlacementConfig(pools=pools, roles={role: RoleConfig(pool="all") for role in ("policy", "learner", "grm")})


def test_a_run_that_takes_all_cores_of_this_machine_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert [read_setup(run_config(placement=placement(slots))).cores_taken for slots in (3, 4, 5)] == [0, 4, 4]
    assert read_setup(run_config(placement=placement(4, "gpu"))).cores_taken == 0
    config = run_config(placement=placement(4))
    joined = replace(config, cluster=ClusterConfig(address="head:6379"))
    assert read_setup(joined).cores_taken == 0


def test_advice_names_the_models_whose_engines_have_slots() -> None:
    adapter = GrmConfig(path="tiny://grm", lora=LoraConfig(rank=4, sync="adapters", path="x"))
    config = run_config(
        policy=PolicyConfig(path="tiny://policy"),
        grm=adapter,
        models={"second": replace(adapter, adapter_of="grm")},
        judges={"second": judge_config(model="second")},
        reward=RewardConfig(kind="jury", members=["judge", "second"]),
    )
    assert read_setup(config).grms == ("grm",)
