"""Whole runs whose learner and engines share their slots in time: the same training, without losses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from safetensors.numpy import load_file

from grmpipe.models.engines.embedded.embedded_worker import EmbeddedWorker
from grmpipe.pipeline.interfaces import TrainedBatch
from grmpipe.tasks import RunFailed
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.types import JudgedGroup

BY_TURNS = ("placement=time_shared", "placement.pools.all.slots=1")


def turns_of(run: Any) -> list[dict]:
    events = json.loads((run.run_dir / "timeline.json").read_text())
    return [event for event in events if event.get("name") == "the learner's phase"]


def test_time_shared_run_trains_bit_for_bit_what_an_unshared_run_trains(small_run: Callable) -> None:
    """One rollout at a time and a rule as the judge: then batches come in one order, however long anything takes."""
    same = ("judge=rule", "rollout.max_concurrency=1", "train.max_staleness=0", "train.num_steps=2")
    shared, unshared = (small_run(*same, *more, run_dir=name) for name, more in (("by_turns", BY_TURNS), ("apart", ())))
    weights = [load_file(run.run_dir / "policy" / "model.safetensors") for run in (shared, unshared)]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    norms = [[line["train/grad_norm"] for line in run.steps()] for run in (shared, unshared)]
    assert norms[0] == norms[1]


def test_engines_sleep_while_the_learner_steps_and_what_runs_ahead_loses_nothing(
    small_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[str] = []
    abort = EmbeddedWorker.abort

    def note(worker: EmbeddedWorker, request_id: str) -> None:
        if request_id in worker._tickets:
            aborted.append(request_id)
        abort(worker, request_id)

    monkeypatch.setattr(EmbeddedWorker, "abort", note)
    ahead = ("train.max_staleness=1", "train.num_steps=4", "train.checkpoint_every=2")
    run = small_run(*BY_TURNS, *ahead, experiment="distill")
    run.check_complete(16)
    assert all(line["train/taught_share"] == 1 for line in run.steps())
    assert aborted, "nothing was in flight at any step: nothing was shown"
    steps = run.steps()
    assert steps[0]["memory/freed_by_policy_gb"] > 0
    assert steps[0]["memory/freed_by_grm_gb"] > 0
    assert "memory/freed_by_teacher_gb" in steps[0]
    assert len(turns_of(run)) >= 4 + 2, "four steps, and checkpoints between them"


@pytest.mark.long
def test_broken_time_shared_run_resumes_from_the_save_between_two_phases(
    small_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = (*BY_TURNS, "train.num_steps=2", "train.max_staleness=0", "train.checkpoint_every=1")
    step, num_steps = BatchTrainer.step, 0

    async def breaks(trainer: BatchTrainer, batch: Sequence[JudgedGroup]) -> TrainedBatch:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            raise RuntimeError("a cosmic ray")
        return await step(trainer, batch)

    monkeypatch.setattr(BatchTrainer, "step", breaks)
    with pytest.raises(RunFailed, match="a cosmic ray"):
        small_run(*same)
    run = small_run(*same, "resume=auto")
    run.check_complete(8)
    assert run.summary["versions"] == {"policy": 2, "grm": 0}
