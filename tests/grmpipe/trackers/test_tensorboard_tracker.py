"""Real event files, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grmpipe.config.tracking import TrackingConfig
from grmpipe.trackers.tensorboard_tracker import TensorboardConfig
from grmpipe.trackers.tracker import SampleRow, TrackedRun

ROW = SampleRow(
    group_id="g0", sibling=0, question="1 + 1?", answer="# Answer: 2", critique="Score: 10", score=10.0, truth=1.0
)


def read_back(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory)).Reload()


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_back(directory).Scalars(name)]


def test_event_files_hold_each_step_the_configuration_and_rollouts_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = TrackedRun(run_dir=tmp_path, config={"train": {"lr": 3e-4}}, state={})
    tracker = TensorboardConfig().open(run)
    for step in (0, 1):
        tracker.log(step, {"train/grm_score": 5.0 + step, "time/step_s": 0.5})
        assert scalars(tmp_path / "tensorboard", "time/step_s")[-1] == (step, 0.5), "a killed process loses no step"
    tracker.table(1, [ROW])
    tracker.close()
    assert scalars(tmp_path / "tensorboard", "train/grm_score") == [(0, 5.0), (1, 6.0)]
    events = read_back(tmp_path / "tensorboard")
    (config,) = events.Tensors("config/text_summary")
    assert '"lr": 0.0003' in config.tensor_proto.string_val[0].decode()
    (text,) = events.Tensors("rollouts/g0_0/text_summary")
    assert "    # Answer: 2\n" in text.tensor_proto.string_val[0].decode(), "indented: no heading"


def test_a_resume_hides_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for first_step, steps, value in ((0, range(4), 1.0), (3, range(3, 5), 2.0)):
        run = TrackedRun(run_dir=tmp_path / "run", config={}, state={}, first_step=first_step)
        tracker = TensorboardConfig().open(run)
        for step in steps:
            tracker.log(step, {"x": value})
        tracker.close()
    assert scalars(tmp_path / "run" / "tensorboard", "x") == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_without_tensorboard_a_run_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TrackingConfig(trackers=["tensorboard"]).find_missing() == (
        "tracking.trackers: tensorboard can't be used here; type `pip install 'grmpipe[tensorboard]'`"
    )
    assert TrackingConfig(trackers=["wandb"]).find_missing() == ""
