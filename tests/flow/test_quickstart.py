"""The README's claims, run as it says: the quickstart on Ray learns, and a weak judge is hacked and reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
def test_the_quickstart_learns_from_its_judge(tmp_path: Path) -> None:
    # Twice the held-out problems: 256 of them leave 3 points of noise in a figure that this test bounds.
    output = launch(tmp_path, "+experiment=quickstart", "data.num_eval_prompts=512")
    latest = tmp_path / "runs" / "quickstart" / "latest"
    summary = json.loads((latest / "summary.json").read_text())
    before, after = summary["eval"]["initial"], summary["eval"]["final"]
    assert summary["status"] == "completed"
    assert before["true_accuracy"] <= 0.45
    assert after["true_accuracy"] >= 0.70
    assert after["grm_score"] >= before["grm_score"] + 2
    assert summary["max_staleness_trained"] <= 1
    assert summary["alarms"] == []
    assert "critique" in output, "it ends with samples to read"
    assert list((latest / "wandb").glob("offline-run-*")), "W&B is offline without a key"


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
