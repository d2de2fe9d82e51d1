"""Whole runs whose learner's ranks divide the experts of a mixture (train.parallel.ep)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.tiny.mixture import upcycle
from models.tiny.resolve import SHIPPED

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
