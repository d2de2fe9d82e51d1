"""The simulated ranks of a learner: what the driver may call, what a batch costs."""

from __future__ import annotations

from dataclasses import replace
from inspect import getmembers, isfunction
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from simulated_workload import COSTS, seats, workload

import launch  # noqa: F401  registers the schema
from grmpipe.capacity.cost import LearnerSpeed
from grmpipe.capacity.plan.plan_report import plan
from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun, simulate
from grmpipe.capacity.simulate.simulated_learner import SimulatedRanks
from grmpipe.capacity.simulate.simulation import simulator
from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.config.train import AlgorithmConfig
from grmpipe.config.yaml_io import build
from grmpipe.train.batching.packer import idle
from grmpipe.train.learner.backend import LearnerRank
from grmpipe.types import BatchTotals, OldPass

ROOT = Path(__file__).parents[4]
FILES = {"save", "begin_save", "saved", "load", "export"}  # a simulation has none
METHODS = {name for name, _ in getmembers(LearnerRank, isfunction) if not name.startswith("_")} - FILES
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "expect": (3,),
    "accumulate": (idle(), None),
    "old_pass": (idle(),),
    "reference_logprobs": (idle(),),
    "step": (BatchTotals(num_loss_tokens=1, num_sequences=1, num_groups=1, oldest_version=0),),
    "connect": (None,),
    "bucket": (0,),
    "deliver": (0,),
    "score": ((1, 2),),
}


def answered(method: str) -> object:
    """What rank 0 answers."""
    ranks = SimulatedRanks(2, LearnerSpeed(token_s=1e-3, step_s=0.1), 0.1)
    return run_virtually(lambda: ranks.call(0, method, *ARGUMENTS.get(method, ())))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_simulated_ranks_answer_all_that_a_rank_does_without_files(method: str) -> None:
    answered(method)


def test_log_probs_come_in_the_types_of_a_rank() -> None:
    num_tokens = len(idle().token_ids_T)
    old, reference = answered("old_pass"), answered("reference_logprobs")
    assert isinstance(old, OldPass) and isinstance(reference, np.ndarray)
    assert old.logprobs_T.shape == reference.shape == (num_tokens,)


def of_algorithm(steps: int = 4, **algorithm: object) -> SimulatedRun:
    load = workload()
    config = replace(load.config, algorithm=AlgorithmConfig(**algorithm))  # type: ignore[arg-type]
    return simulate(replace(load, config=config), seats(), COSTS, steps)


def test_a_batch_of_two_updates_is_simulated() -> None:
    assert len(of_algorithm(updates_per_batch=2).steps) == 4


def test_a_plan_simulates_two_updates_per_batch() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        overrides = [
            "+experiment=quickstart",
            "train.groups_per_batch=2",
            "plan.steps=2",
            "algorithm.updates_per_batch=2",
        ]
        config = build(compose("config", overrides))
    assert "  simulated " in plan(config, lambda what, share: None, simulator)
