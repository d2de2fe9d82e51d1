"""A run's rollouts, trained again: the same batches and bit-identical weights; or another algorithm on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from grmpipe.run.errors import RunInterrupted
from grmpipe.run.tasks.retrain import RecordedRunTraining
from grmpipe.train.batching import packer
from grmpipe.types import MicroBatch

TOLD_BY_LEARNER = ("train/", "mismatch/", "staleness/")


def without_seconds(trained: list[dict]) -> list[dict]:
    """Lines of trained.jsonl without what a replay doesn't know, and what names the run."""
    names = ("rollout_s", "judging_s", "run", "xxh3")
    return [{name: value for name, value in line.items() if name not in names} for line in trained]


def contents(micro_batches: list[MicroBatch]) -> list[list[bytes]]:
    """The bytes of every array, with its type and shape."""
    return [[repr((a.dtype, a.shape)).encode() + a.tobytes() for a in arrays(one)] for one in micro_batches]


def arrays(micro_batch: MicroBatch) -> list[np.ndarray]:
    found = [getattr(micro_batch, spec.name) for spec in fields(micro_batch)]
    return [array for array in found if array is not None]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "policy" / "model.safetensors").read_bytes()


def of_learner(steps: list[dict]) -> list[dict]:
    return [{key: value for key, value in step.items() if key.startswith(TOLD_BY_LEARNER)} for step in steps]


def test_a_replay_comes_to_the_same_weights_and_another_algorithm_to_others(
    small_run: Callable, taken: list[MicroBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = small_run("judge=rule", "train.lr=3e-3", run_dir="first")
    first_batches = contents(taken)
    for name in ("rollouts", "judgements", "groups"):  # a kill may tear the last line
        with (recorded.run_dir / f"{name}.jsonl").open("a") as file:
            file.write('{"group_id":"g0000')
    source = f"data.retrain_from={recorded.run_dir}/rollouts.jsonl"

    # The same.
    taken.clear()
    again = small_run(source, "judge=rule", "train.lr=3e-3", run_dir="again")
    assert len(first_batches) >= 3 and contents(taken) == first_batches
    assert weights(again.run_dir) == weights(recorded.run_dir)
    assert of_learner(again.steps()) == of_learner(recorded.steps())
    assert {"train/loss", "train/grad_norm", "train/true_accuracy"} <= of_learner(again.steps())[0].keys()
    summary = again.summary
    assert (summary["status"], summary["steps"], summary["versions"]) == ("completed", 3, {"policy": 3})
    assert summary["groups"] == {"submitted": 12, "trained": 12, "dropped": {}, "in_flight": 0}
    assert summary["max_staleness_trained"] == recorded.summary["max_staleness_trained"]
    assert list(summary["busy_s"]) == ["learner"] and summary["judging"]["asked"] == 0
    assert not (again.run_dir / "rollouts.jsonl").exists(), "nothing was sampled"
    assert without_seconds(again.lines("trained")) == without_seconds(recorded.lines("trained"))

    # Stopped after a step, and continued.
    step = RecordedRunTraining._step

    async def step_and_stop(run: RecordedRunTraining, *args: object) -> None:
        await step(run, *args)  # type: ignore[arg-type]
        run._stop()

    resumable = (source, "judge=rule", "train.lr=3e-3", "resume=auto")
    with monkeypatch.context() as patch, pytest.raises(RunInterrupted, match="at step 1"):
        patch.setattr(RecordedRunTraining, "_step", step_and_stop)
        small_run(*resumable, run_dir="stopped")
    resumed = small_run(*resumable, run_dir="stopped")
    assert weights(resumed.run_dir) == weights(recorded.run_dir)
    assert [line["step"] for line in resumed.lines("groups")] == [1] * 4 + [2] * 4 + [3] * 4
    assert of_learner(resumed.steps()) == of_learner(recorded.steps())
    assert without_seconds(resumed.lines("trained")) == without_seconds(recorded.lines("trained"))

    # Another algorithm on the same data.
    other = small_run(source, "judge=rule", "algorithm=gspo", "algorithm.updates_per_batch=2", run_dir="other")
    assert other.summary["status"] == "completed"
    assert weights(other.run_dir) != weights(recorded.run_dir)
    assert [line["group_id"] for line in other.lines("groups")] == [line["group_id"] for line in again.lines("groups")]

    # The stored verdicts as preferences: the reference is the policy as it was, whose answers these are.
    for algorithm in ("dpo", "raft"):
        by_rank = small_run(source, "judge=rule", f"algorithm={algorithm}", run_dir=algorithm)
        assert by_rank.summary["status"] == "completed"
        assert weights(by_rank.run_dir) not in (weights(recorded.run_dir), weights(other.run_dir))
    chosen = [line["advantage"] for line in by_rank.lines("trained")]
    assert set(chosen) == {0.0, 1.0}


@pytest.mark.long
def test_replay_passes_parts_of_a_micro_batch_where_the_run_did(
    small_run: Callable, taken: list[MicroBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle learner begins with a part of a micro-batch."""
    monkeypatch.setattr(packer, "EARLY_SHARE", 1e-3)
    eager = small_run("judge=rule", "train.lr=3e-3", run_dir="eager")
    first_batches = contents(taken)
    assert any(line.get("early") for line in eager.lines("groups")) and len(first_batches) > 3
    taken.clear()
    small_run(f"data.retrain_from={eager.run_dir}", "judge=rule", "train.lr=3e-3", run_dir="again")
    assert contents(taken) == first_batches
