"""Whole runs in which ranks divide the experts of a mixture: of the policy, or of a GRM that learns beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grmpipe.tiny.resolve import SHIPPED
from grmpipe.tiny.upcycle import upcycle

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_here")]
RUN = ("cluster=ray", "placement=two_ranks", "judge=rule", "train.deterministic=true", "train.num_steps=2",
       "algorithm.router_replay=rollout", "data.num_eval_prompts=4")  # fmt: skip


def test_a_run_with_divided_experts_begins_as_one_without(
    run_once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two ranks, and the same with all experts on each: equal loss and gradient; every push is confirmed."""
    policy = tmp_path_factory.mktemp("mixture")
    upcycle(SHIPPED / "policy", policy, noise=0.3)
    divided, whole = (
        run_once(*RUN, f"policy.path={policy}", f"train.parallel.ep={ep}", run_dir=f"ep{ep}") for ep in (2, 1)
    )
    for run in (divided, whole):
        assert (run.summary["status"], run.summary["steps"]) == ("completed", 2)
        assert all(line["sync/probe_error_nats"] < 1e-3 for line in run.steps())
    first, expected = divided.steps()[0], whole.steps()[0]
    names = ("train/loss", "train/grad_norm", "experts/max_violation", "experts/router_entropy")
    assert {name: first[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-4)
    assert 0 <= first["experts/unused_share"] < 1 and first["train/grad_norm"] > 1e-4
    assert (Path(divided.run_dir) / "policy" / "model.safetensors").is_file()


def test_the_ranks_of_a_grm_in_training_divide_its_experts(
    run_once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As on one rank: equal gradients of the first judging tasks; every push to its engines is confirmed."""
    grm = tmp_path_factory.mktemp("grm")
    upcycle(SHIPPED / "grm", grm, noise=0.3)
    run = (
        "cluster=ray", "placement=two_ranks", "placement.roles.learner.replicas=1", f"grm.path={grm}",
        "placement.roles.grm_learner.replicas=2", "train.num_steps=2", "grm.train.warmup_steps=2",
        "grm.train.rollout_share=0", "data.num_eval_prompts=4", "train.group_size=4", "train.groups_per_batch=4",
    )  # fmt: skip
    divided, whole = (
        run_once(*run, f"grm.train.parallel.ep={ep}", experiment="cotrain", run_dir=f"grm_ep{ep}") for ep in (2, 1)
    )
    for files in (divided, whole):
        assert files.summary["status"] == "completed" and files.summary["versions"]["grm"] >= 3
    first, expected = (files.steps()[0] for files in (divided, whole))
    names = ("grm/grad_norm", "grm/experts/router_entropy")
    assert {name: first[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-3)
    assert first["grm/grad_norm"] > 1e-4
