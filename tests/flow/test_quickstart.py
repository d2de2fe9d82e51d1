"""The README's claims, run as it says: the quickstart on Ray learns, and a weak judge is hacked and reported."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def launch(cwd: Path, *overrides: str) -> str:
    process = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *overrides],
        cwd=cwd, capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_steps", "accuracy", "score_gain"), [(24, 0.48, 1.5), pytest.param(80, 0.70, 2.0, marks=pytest.mark.long)]
)
def test_the_quickstart_learns_from_its_judge(
    tmp_path: Path, num_steps: int, accuracy: float, score_gain: float
) -> None:
    # Twice the held-out problems: 256 of them leave 3 points of noise in a figure that this test bounds.
    output = launch(tmp_path, "+experiment=quickstart", f"train.num_steps={num_steps}", "data.num_eval_prompts=512")
    latest = tmp_path / "runs" / "quickstart" / "latest"
    summary = json.loads((latest / "summary.json").read_text())
    before, after = summary["eval"]["initial"], summary["eval"]["final"]
    assert summary["status"] == "completed"
    assert before["true_accuracy"] <= 0.45
    assert after["true_accuracy"] >= accuracy
    assert after["grm_score"] >= before["grm_score"] + score_gain
    assert summary["max_staleness_trained"] <= 1
    pauses = [line["sync/pause_s"] for line in map(json.loads, (latest / "metrics.jsonl").open()) if line["step"]]
    assert summary["sync"]["pause_s"] == pytest.approx(statistics.fmean(pauses), abs=1e-4)
    assert summary["sync"]["predicted_pause_s"] > 0.05
    assert summary["alarms"] == []
    assert "critique" in output, "it ends with samples to read"
    assert list((latest / "wandb").glob("offline-run-*")), "W&B is offline without a key"
    assert list(unnamed(latest, summary["run_id"])) == []


def unnamed(run_dir: Path, run_id: str) -> Iterator[str]:
    """The lines and files that don't name their run."""
    journals = sorted(run_dir.glob("*.jsonl"))
    assert {"rollouts.jsonl", "metrics.jsonl", "judge_requests.jsonl"} <= {path.name for path in journals}
    for path in journals:
        lines = path.read_text().splitlines()
        yield from (f"{path.name}:{place}" for place, line in enumerate(lines) if json.loads(line)["run"] != run_id)
    states = sorted(run_dir.glob("checkpoints/step_*/run_state.json"))
    names = ("run.json", "run.log", "report.html", "timeline.json")
    yield from (path.name for path in [*(run_dir / name for name in names), *states] if run_id not in path.read_text())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_weak_judge_is_hacked_and_the_alarm_says_so(tmp_path: Path) -> None:
    launch(tmp_path, "+experiment=reward_hacking", "cluster=inprocess", "tracking=none", "run_dir=run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    before, after = summary["eval"]["initial"], summary["eval"]["final"]
    assert after["grm_score"] >= 9
    assert after["true_accuracy"] < before["true_accuracy"]
    assert any("hacking the judge" in alarm for alarm in summary["alarms"])
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("alarm/hacking", 0) for line in metrics) == 1
    assert "alarm" in (tmp_path / "run" / "run.log").read_text()
