"""Whole runs in separate processes, on one Ray: two ranks of a learner, elastic slots, time-shared slots."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("ray_here")]


@pytest.mark.long
def test_two_ranks_on_ray_train_as_one_in_this_process(small_run: Callable) -> None:
    """Synchronous and seeded, so that both runs sample the same rollouts for their first step."""
    common = ("train.num_steps=2", "train.max_staleness=0", "train.micro_batch_tokens=512")
    one = small_run(*common, run_dir="one").steps()[0]
    two = small_run(*common, "cluster=ray", "placement=two_ranks", run_dir="two").steps()[0]
    for name in ("train/reward", "train/loss", "train/grad_norm", "train/entropy_nats"):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


@pytest.mark.long  # tests/flow/test_elastic.py moves them in this process
def test_slots_move_between_processes(small_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grmpipe.scheduler.slots.elastic.ASSUMED_SWITCH_S", 0.05)
    run = small_run("placement=elastic", "train.num_steps=4", "cluster=ray")
    run.check_complete(16)
    assert set(run.summary["moves"]) == {"policy->grm", "grm->policy"}
    assert 0 < run.steps()[-1]["moves/total"] <= sum(run.summary["moves"].values())


def test_learner_and_engines_take_turns_in_processes_of_their_own(small_run: Callable) -> None:
    run = small_run("placement=time_shared", "cluster=ray", "train.num_steps=2", "train.max_staleness=1")
    run.check_complete(8)
    events = json.loads((run.run_dir / "timeline.json").read_text())
    assert sum(event.get("name") == "the learner's phase" for event in events) >= 2
