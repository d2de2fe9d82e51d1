"""A run with a critic, planned and simulated: its memory, its work, and that it overlaps with the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from simulated_workload import COSTS, workload

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.cost import LearnerSpeed
from grmpipe.capacity.plan.plan_report import plan
from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun, simulate
from grmpipe.config.critic import CriticConfig
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import RunConfig
from grmpipe.config.train import AlgorithmConfig
from grmpipe.scheduler.placement import PlacementConfig, PoolConfig, RoleConfig, place

ROOT = Path(__file__).parents[4]


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", ["+experiment=ppo", "train.groups_per_batch=4", *overrides]))


def test_a_plan_tells_the_critics_place_memory_and_work() -> None:
    text = plan(composed("placement=two_ranks", "train.micro_batch_tokens=1024")).text
    assert "learner-1 (33%), grm-0 (33%), critic-1 (33%)" in text
    told = text.split("  critic   ")[1].split("memory per slot")[0]
    assert "optimizer, two moments, over 2 ranks" in told and "activations of 1024 tokens" in told
    assert "of work for each of 2" in text.split("time of a step")[1].split("  critic   ")[1].splitlines()[0]


SPEED_OF_BOTH = LearnerSpeed(token_s=1e-4, step_s=0.1)


class Names:
    """The names of spans."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None:
        self.names.add(name)


def simulated(critic: LearnerSpeed | None, events: Names) -> SimulatedRun:
    load = workload()
    train = replace(load.config.train, prefix_sharing=False)  # a critic packs each rollout whole
    config = replace(load.config, train=train)
    pools = {name: PoolConfig(slots=slots) for name, slots in (("p", 2), ("g", 2), ("train", 1), ("critic", 1))}
    roles = {"policy": RoleConfig(pool="p", replicas=2), "grm": RoleConfig(pool="g", replicas=2)}
    roles |= {"learner": RoleConfig(pool="train"), "critic": RoleConfig(pool="critic")}
    if critic is not None:
        config = replace(config, critic=CriticConfig(enabled=True), algorithm=AlgorithmConfig(estimator="gae"))
    placement = place(PlacementConfig(pools=pools, roles=roles), tuple(roles), ("policy", "grm"))
    costs = replace(COSTS, learner=SPEED_OF_BOTH, critic=critic)
    return simulate(replace(load, config=config), placement, costs, 6, events)


def test_simulated_critic_works_a_third_more_than_the_learner_and_overlaps_it() -> None:
    """A value and as much training per token; on its own slots it adds little to a step."""
    events = Names()
    run = simulated(SPEED_OF_BOTH, events)
    loads = run.bound.loads_s
    assert loads["critic"] - 0.1 == pytest.approx(4 / 3 * (loads["learner"] - 0.1 - COSTS.sync_s), rel=1e-6)
    assert run.busy["critic"] > 0 and run.busy["learner"] > 0
    without = simulated(None, Names())
    assert "critic" not in without.busy
    assert without.step_s <= run.step_s < without.step_s + loads["critic"], "it is hidden"
    assert {"values", "accumulate"} <= events.names
