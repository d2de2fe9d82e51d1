"""A real client of MLflow, with files instead of a server: metrics, rollouts, one run over a resume, and its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from grmpipe.config.tracking import TrackingConfig
from grmpipe.trackers.mlflow_tracker import MlflowConfig
from grmpipe.trackers.tracker import SampleRow, TrackedRun

ROW = SampleRow(
    group_id="g0", sibling=0, question="1 + 1?", answer="Answer: 2", critique="Score: 10", score=10.0, truth=1.0
)


def test_a_run_has_its_metrics_rollouts_and_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    state: dict[str, str] = {}
    for step, ends in ((1, "failed"), (2, "completed")):
        tracker = MlflowConfig(experiment="e").open(
            TrackedRun(run_dir=tmp_path / "run_3", config={"train": {"lr": 3e-4}}, state=state, first_step=step)
        )
        tracker.log(step, {"train/reward": 0.25 + step, "eval/pass@4": 0.5, "train/x": float("nan")})
        tracker.table(step, [ROW])
        tracker.end(ends, "out of memory" if ends == "failed" else None)
        state = dict(tracker.resume_state())
        tracker.close()
        found = MlflowClient().get_run(state["run_id"])
        assert found.info.status == {"failed": "FAILED", "completed": "FINISHED"}[ends]
    assert found.info.run_name == "run_3"
    assert found.data.metrics == {"train/reward": 2.25, "eval/pass_4": 0.5}
    history = MlflowClient().get_metric_history(state["run_id"], "train/reward")
    assert [(point.step, point.value) for point in history] == [(1, 1.25), (2, 2.25)]
    written = {path.name: path.read_text() for path in (tmp_path / "store").rglob("*.json")}
    assert written.keys() == {"config.json", "1.json", "2.json"}
    assert "Answer: 2" in written["2.json"]


def test_without_the_library_or_a_server_a_run_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert TrackingConfig(trackers=["mlflow"]).find_missing() == (
        "tracking.trackers: mlflow can't be used here; set MLFLOW_TRACKING_URI to your server, for example "
        "http://localhost:5000"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TrackingConfig(trackers=["mlflow"]).find_missing().endswith("type `pip install 'grmpipe[mlflow]'`")
