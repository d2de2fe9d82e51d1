"""task=runs: what a table of runs says of a sweep, a run that goes on and one that only evaluates."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from configs import run_config
from rich.console import Console

from grmpipe.config.run_config import ConfigError
from grmpipe.run.tasks.list_runs import list_runs


def write_run(run_dir: Path, config: str, summary: dict[str, object] | None, *lines: dict[str, float]) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(config)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))


def test_a_line_for_each_run_says_how_it_stands_and_what_differs(tmp_path: Path) -> None:
    sweep = "experiment_name: x\ntask: train\ntrain: {{lr: {lr}}}\nseed: 0\n"
    done = {"status": "completed", "steps": 8}
    write_run(tmp_path / "x" / "0", sweep.format(lr=0.1), done, {"step": 8, "eval/true_accuracy": 0.75})
    write_run(tmp_path / "x" / "1", sweep.format(lr=0.2), None, {"step": 3, "eval/reward": 0.5})
    judged = {"status": "completed", "eval": {"final": {"accuracy": 0.65, "accuracy_low": 0.5, "accuracy_high": 0.75}}}
    write_run(tmp_path / "judge", "experiment_name: judge\ntask: evaluate\n", judged)
    out = io.StringIO()
    list_runs(run_config(run_dir=str(tmp_path), task="runs"), Console(file=out, width=200))
    header, _, *rows = (line.split() for line in out.getvalue().splitlines())
    assert header == ["run", "status", "steps", "reward", "true", "changed", "figures", "differs", "in"]
    by_name = {row[0]: row[1:] for row in rows if row}
    assert by_name["x/0"][:3] == ["completed", "8", "0.750"]
    assert by_name["x/0"][-1] == "train.lr=0.1"
    assert by_name["x/1"][-1] == "train.lr=0.2"
    assert "0.500" in by_name["x/1"]
    assert " ".join(by_name["judge"][-3:]) == "0.65 [0.5, 0.75]"


def test_without_a_run_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run_dir: .* holds no run; type run_dir="):
        list_runs(run_config(run_dir=str(tmp_path), task="runs"))
