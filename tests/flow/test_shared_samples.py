"""Whole runs whose learner's ranks share each sample (train.parallel.cp): as with one rank, and repeatable."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grmpipe.run_dir.recorded_run import open_recorded
from grmpipe.tiny.resolve import SHIPPED

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_here")]
RUN = (
    "cluster=ray", "train.deterministic=true", "train.num_steps=3", "train.max_staleness=1", "train.lr=3e-3",
    "algorithm.kl_coefficient=0.05", "algorithm.kl_in_reward=true", "algorithm.updates_per_batch=2",
    "algorithm.loss=gspo", "algorithm.replay_buffer.groups=1",
)  # fmt: skip
SHARED = ("placement=two_ranks", "train.parallel.cp=2", "train.micro_batch_tokens=512")
ONE_RANK = ("placement=two_ranks", "placement.roles.learner.replicas=1", "train.micro_batch_tokens=1024")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped policy with a fourth query head that changes nothing: three can't be divided."""
    directory = tmp_path_factory.mktemp("policy") / "policy"
    shutil.copytree(SHIPPED / "policy", directory)
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = torch.cat([weight, weight[:32]])
        elif name.endswith("o_proj.weight"):
            weights[name] = torch.cat([weight, torch.zeros_like(weight[:, :32])], dim=1)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4}))
    return str(directory)


@pytest.fixture(scope="module")
def shared(run_once: Callable[..., Any], policy: str) -> Any:
    return run_once(*RUN, *SHARED, f"policy.path={policy}", run_dir="shared")


def trained(run_dir: Path, step: int) -> list[tuple[Any, ...]]:
    return [tuple(replace(rollout, took_s=0.0) for rollout in group.rollouts) for group in
            open_recorded(run_dir).batch(step)]  # fmt: skip


def test_a_run_with_shared_samples_begins_as_that_of_one_rank(
    shared: Any, run_once: Callable[..., Any], policy: str
) -> None:
    """The same rollouts, loss and gradient in the first step. Later ones differ by rounding."""
    one = run_once(*RUN, *ONE_RANK, f"policy.path={policy}", run_dir="one")
    for run in (shared, one):
        assert (run.summary["status"], run.summary["steps"]) == ("completed", 3)
        assert all(line["sync/probe_error_nats"] < 1e-3 for line in run.steps())
    assert trained(shared.run_dir, 1) == trained(one.run_dir, 1)
    first, expected = shared.steps()[0], one.steps()[0]
    for name in ("loss", "grad_norm", "entropy_nats", "correction_mean", "packed_tokens", "unshared_tokens"):
        assert first[f"train/{name}"] == pytest.approx(expected[f"train/{name}"], rel=1e-4, abs=1e-6), name
    assert expected["train/grad_norm"] > 1e-4
    assert "train/rank_imbalance" not in first, "both ranks have the same work"


def test_two_runs_with_shared_samples_are_equal_bit_for_bit(
    shared: Any, run_once: Callable[..., Any], policy: str
) -> None:
    again = run_once(*RUN, *SHARED, f"policy.path={policy}", run_dir="again")
    for step in (1, 2, 3):
        assert trained(shared.run_dir, step) == trained(again.run_dir, step)
    weights, others = (load_file(run.run_dir / "policy" / "model.safetensors") for run in (shared, again))
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_run_that_shared_samples_resumes_on_one_rank(shared: Any, run_once: Callable[..., Any], policy: str) -> None:
    """Its checkpoint and its configuration allow it."""
    resumed = shared.run_dir.with_name("resumed")
    shutil.copytree(shared.run_dir, resumed)
    more = ("train.num_steps=4", "resume=auto", f"policy.path={policy}")
    run = run_once(*RUN, *ONE_RANK, *more, run_dir="resumed")
    assert (run.summary["status"], run.summary["steps"]) == ("completed", 4)
