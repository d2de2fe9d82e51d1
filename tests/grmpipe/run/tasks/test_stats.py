"""What a run's statistics take from its configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from configs import run_config

from grmpipe.config.run_sections import ClusterConfig
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
