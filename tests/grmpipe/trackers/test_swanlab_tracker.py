"""A real SwanLab, offline: it asks nothing, and a resume continues its experiment."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from grmpipe.config.tracking import TrackingConfig
from grmpipe.trackers.swanlab_tracker import SwanlabConfig
from grmpipe.trackers.tracker import SampleRow, TrackedRun

ROW = SampleRow(
    group_id="g0", sibling=0, question="1 + 1?", answer="Answer: 2", critique="Score: 10", score=10.0, truth=1.0
)


@pytest.mark.skipif(importlib.util.find_spec("swanlab") is None, reason="needs pip install 'grmpipe[swanlab]'")
def test_offline_an_experiment_has_the_steps_of_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    state: dict[str, str] = {}
    for step in (1, 2):
        tracker = SwanlabConfig(project="p").open(
            TrackedRun(run_dir=tmp_path / "run", config={"train": {"lr": 3e-4}}, state=state, first_step=step)
        )
        tracker.log(step, {"train/reward": 0.25 + step})
        tracker.table(step, [ROW])
        tracker.end("completed", None)
        state = dict(tracker.resume_state())
        tracker.close()
    files = sorted((tmp_path / "run" / "swanlog").rglob("*.swanlab"))
    assert [path.name for path in files] == [f"run-{state['run_id']}.swanlab"] * 2, "one experiment"
    logs = [path.read_bytes() for path in files]
    assert all(b"train/reward" in log for log in logs)
    texts = [path.read_text() for path in (tmp_path / "run" / "swanlog").rglob("*.txt")]
    assert len(texts) == 2
    assert all('"answer": "Answer: 2"' in text for text in texts)
    assert not list((tmp_path / "run" / "swanlog").rglob("requirements*")), "nothing of the machine"
    assert "API" not in "".join(capfd.readouterr()), "it asks for no key"


def test_without_swanlab_a_run_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TrackingConfig(trackers=["swanlab"]).find_missing() == (
        "tracking.trackers: swanlab can't be used here; type `pip install 'grmpipe[swanlab]'`"
    )
    assert SwanlabConfig().destination() == "SwanLab offline; set SWANLAB_API_KEY to go online"
