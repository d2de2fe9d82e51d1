"""The learning curve is drawn only from run directories."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plot_learning_curve.py"


@pytest.fixture(scope="module")
def plot() -> Any:
    """The script, with matplotlib."""
    spec = importlib.util.spec_from_file_location("plot_learning_curve", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look up their module
    spec.loader.exec_module(script)
    return script


def run_dir(path: Path, accuracy: dict[int, float | None]) -> Path:
    path.mkdir()
    lines = [
        json.dumps({"step": step, "eval/true_accuracy": value, "eval/grm_score": 5}) for step, value in accuracy.items()
    ]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + '{"step": 9, "tor')
    return path


def test_points_are_scaled_and_steps_without_a_number_left_out(tmp_path: Path, plot: Any) -> None:
    directory = run_dir(tmp_path / "a", {0: 0.25, 10: None, 20: 0.75})
    curves = {curve.metric: curve for curve in plot.CURVES}
    assert plot.points_of(directory, curves["eval/true_accuracy"]) == {0: 0.25, 20: 0.75}
    assert plot.points_of(directory, curves["eval/grm_score"]) == {0: 0.5, 10: 0.5, 20: 0.5}


def test_the_mean_is_taken_where_every_seed_has_a_value(plot: Any) -> None:
    assert plot.mean_over_seeds([{0: 0.0, 10: 0.5, 20: 0.5}, {0: 1.0, 10: 1.0}]) == {0: 0.5, 10: 0.75}
    assert plot.mean_over_seeds([]) == {}


@pytest.mark.parametrize("name", ["curve.png", "curve.svg"])
def test_several_runs_make_one_picture(tmp_path: Path, plot: Any, name: str) -> None:
    run_dirs = [run_dir(tmp_path / seed, {0: 0.25, 20: 0.75}) for seed in ("a", "b")]
    plot.draw(run_dirs, tmp_path / "docs" / name, "title")
    picture = (tmp_path / "docs" / name).read_bytes()
    assert b"PNG" in picture[:8] or b"<svg" in picture[:2000]


def test_a_directory_without_metrics_is_refused_in_words(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--out", str(tmp_path / "x.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no metrics to draw" in done.stderr
    assert "Traceback" not in done.stderr
