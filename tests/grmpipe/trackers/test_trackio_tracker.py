"""A real Trackio, with its database in a folder: metrics, rollouts, alarms, and one run over a resume."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from grmpipe.config.tracking import TrackingConfig
from grmpipe.trackers.tracker import SampleRow, TrackedRun
from grmpipe.trackers.trackio_tracker import TrackioConfig

ROW = SampleRow(
    group_id="g0", sibling=0, question="1 + 1?", answer="Answer: 2", critique="Score: 10", score=None, truth=1.0
)


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs pip install 'grmpipe[trackio]'")
def test_a_run_has_its_metrics_rollouts_and_alarms_and_a_resume_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.utils, trackio.sqlite_storage):  # it reads TRACKIO_DIR at its import
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    state: dict[str, str] = {}
    for step in (1, 2):
        tracker = TrackioConfig(project="e").open(
            TrackedRun(run_dir=tmp_path / "run_3", config={"train": {"lr": 3e-4}}, state=state, first_step=step)
        )
        tracker.log(step, {"train/reward": 0.25 + step, "train/x": float("nan")})
        tracker.table(step, [ROW])
        tracker.alarm("the judge is fooled")
        state = json.loads(json.dumps(dict(tracker.resume_state())))
        tracker.close()
    assert state == {"name": "run_3"}
    store = trackio.sqlite_storage.SQLiteStorage
    assert store.get_runs("e") == ["run_3"]
    assert store.get_run_config("e", "run_3")["train"] == {"lr": 3e-4}
    logged = store.get_logs("e", "run_3")
    assert [(one["step"], one["train/reward"]) for one in logged if "train/reward" in one] == [(1, 1.25), (2, 2.25)]
    tables = [one["rollouts"] for one in logged if "rollouts" in one]
    assert [table["_value"][0]["answer"] for table in tables] == ["Answer: 2", "Answer: 2"]
    assert [one["text"] for one in store.get_alerts("e")] == ["the judge is fooled"] * 2


def test_without_the_library_a_run_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TrackingConfig(trackers=["trackio"]).find_missing() == (
        "tracking.trackers: trackio can't be used here; type `pip install 'grmpipe[trackio]'`"
    )
