"""A run with a critic, planned and simulated: its memory, its work, and that it overlaps with the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import launch  # noqa: F401  registers the schema
from grmpipe.capacity.plan.plan_report import plan
from grmpipe.capacity.simulate.simulation import run_simulation
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.yaml_io import build

ROOT = Path(__file__).parents[4]
COSTS = (
    "simulate.costs.policy.step_s=0.01", "simulate.costs.grm.step_s=0.01", "simulate.costs.learner_token_s=1e-4",
    "simulate.costs.learner_step_s=0.1", "plan.cores=8",
)  # fmt: skip
CRITIC = ("simulate.costs.critic_token_s=1e-4", "simulate.costs.critic_step_s=0.1")


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", ["+experiment=ppo", "train.groups_per_batch=4", *overrides]))


def simulated(run_dir: Path, *overrides: str) -> dict:
    run_simulation(composed("simulate.steps=6", f"run_dir={run_dir}", *COSTS, *overrides), lambda what, share: None)
    return json.loads((run_dir / "simulation.json").read_text())


def test_a_plan_tells_the_critics_place_memory_and_work() -> None:
    text = plan(composed("placement=two_ranks", "critic.micro_batch_tokens=1024"), lambda what, share: None)
    assert "learner-1 (33%), grm-0 (33%), critic-1 (33%)" in text
    told = text.split("  critic   ")[1].split("memory per slot")[0]
    assert "optimizer, two moments, over 2 ranks" in told and "activations of 1024 tokens" in told
    assert "of work for each of 2" in text.split("time of a step")[1].split("  critic   ")[1].splitlines()[0]


def test_a_simulated_critic_works_a_third_more_than_the_learner_and_beside_it(tmp_path: Path) -> None:
    """A value and as much training per token; on its own slots it adds little to a step."""
    run = simulated(tmp_path / "ppo", "train.prefix_sharing=false", *CRITIC)  # a critic packs each rollout whole
    assert run["loads_s"]["critic"] - 0.1 == pytest.approx(4 / 3 * (run["loads_s"]["learner"] - 0.1), rel=1e-6)
    assert run["busy"]["critic"] > run["busy"]["learner"] > 0
    without = simulated(tmp_path / "raw", "train.prefix_sharing=false", "algorithm=grpo", "critic=none")
    assert "critic" not in without["busy"]
    alone = run["loads_s"]["critic"]
    assert without["step_s"] < run["step_s"] < without["step_s"] + alone, "some of it is hidden"
    names = {span["name"] for span in json.loads((tmp_path / "ppo" / "timeline.json").read_text())}
    assert {"values", "accumulate"} <= names


def test_costs_without_the_critics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"simulate\.costs\.critic_token_s"):
        simulated(tmp_path / "half")
