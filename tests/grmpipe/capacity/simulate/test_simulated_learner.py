"""The simulated ranks of a learner: what the driver may call, what a batch costs."""

from __future__ import annotations

from dataclasses import replace
from inspect import getmembers, isfunction
from pathlib import Path

import numpy as np
import pytest
from simulated_workload import COSTS, seats, workload

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.cost import Costs, LearnerSpeed
from grmpipe.capacity.plan.work import count_passes
from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun, simulate
from grmpipe.capacity.simulate.simulated_learner import SimulatedRanks
from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.config.train import AlgorithmConfig
from grmpipe.train.batching.packer import idle
from grmpipe.train.learner.backend import LearnerRank, SendsWeights
from grmpipe.types import BatchTotals, OldPass

ROOT = Path(__file__).parents[4]
FILES = {"save", "begin_save", "saved", "load", "export", "average"}  # a simulation has none
METHODS = {
    f"{prefix}{name}"
    for prefix, part in (("", LearnerRank), ("sender.", SendsWeights))
    for name, _ in getmembers(part, isfunction)
    if not name.startswith("_")
} - FILES
TOTALS = BatchTotals(num_loss_tokens=1, num_sequences=1, num_groups=1, oldest_version=0)
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "expect": (3,),
    "accumulate": (idle(), None),
    "old_pass": (idle(),),
    "reference_logprobs": (idle(),),
    "imitate": (idle(), TOTALS),
    "step": (TOTALS,),
    "sender.connect": (None,),
    "sender.bucket": (0,),
    "sender.broadcast": (0, 1),
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


def of_algorithm(costs: Costs = COSTS, **algorithm: object) -> SimulatedRun:
    load = workload()
    config = replace(load.config, algorithm=AlgorithmConfig(**algorithm))  # type: ignore[arg-type]
    return simulate(replace(load, config=config), seats(), costs, 4)


def test_a_batch_of_two_updates_is_simulated() -> None:
    assert len(of_algorithm(updates_per_batch=2).steps) == 4


@pytest.mark.parametrize(
    ("algorithm", "num_forward", "num_updates"),
    [
        ({}, 0, 1),
        ({"kl_coefficient": 0.1}, 1, 1),
        ({"kl_coefficient": 0.1, "kl_in_reward": True, "kl_estimator": "k1"}, 1, 1),
        ({"updates_per_batch": 2}, 1, 2),
        ({"updates_per_batch": 9}, 1, 4),
        ({"updates_per_batch": 2, "proximal": "sampler", "correction": "none"}, 0, 2),
        ({"updates_per_batch": 2, "kl_coefficient": 0.1}, 2, 2),
    ],
)
def test_a_plan_and_a_bound_count_the_passes_that_a_batch_takes(
    algorithm: dict[str, object], num_forward: int, num_updates: int
) -> None:
    """By the calls of the real BatchTrainer: 3 ms for a packed token, 1 ms of it without gradients."""
    passes = count_passes(AlgorithmConfig(**algorithm), groups_per_batch=4)  # type: ignore[arg-type]
    assert (passes.num_forward, passes.num_updates) == (num_forward, num_updates)
    run = of_algorithm(replace(COSTS, learner=LearnerSpeed(token_s=3e-3, step_s=10.0)), **algorithm)
    tokens = 4 * (26 + 4 * 100)  # 4 groups of 4 siblings with a prompt of 26 tokens
    took_s = run.steps[-1].busy_s["learner"] / len(run.steps) - COSTS.sync_s
    assert took_s == pytest.approx(tokens * (3 + num_forward) * 1e-3 + num_updates * 10.0, rel=0.02)
    assert run.bound.loads_s["learner"] - COSTS.sync_s == pytest.approx(took_s, rel=0.02)
    assert run.times_bound > 0.999
