"""The tasks from the command line: a sweep, the doctor, and what they exit with."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grmpipe.doctor import doctor, line_of

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TINY_RUN = (
    "+experiment=quickstart", "cluster=inprocess", "tracking=none", "train.num_steps=1", "train.groups_per_batch=2",
    "train.group_size=2", "data.num_eval_prompts=4", "data.num_prompts=32",
)  # fmt: skip


def launch(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)


def test_a_sweep_runs_each_point_in_a_directory_of_its_own_and_has_their_objectives(tmp_path: Path) -> None:
    result = launch(tmp_path, "-m", *TINY_RUN, "train.lr=1e-4,2e-4")
    assert result.returncode == 0, result.stderr
    runs = [path for path in (tmp_path / "runs/quickstart").iterdir() if not path.is_symlink()]
    assert len(runs) == 2
    assert sorted("lr: 0.0001" in (run / "config.yaml").read_text() for run in runs) == [False, True]
    assert all(json.loads((run / "summary.json").read_text())["objective"] is not None for run in runs)
    assert re.findall(r"^sweep, run (\d): .* train\.lr=(\S+)$", result.stdout, re.MULTILINE) == [
        ("0", "0.0001"),
        ("1", "0.0002"),
    ]
    assert len(re.findall(r"^sweep, run \d: eval\.final\.\w+ = [\d.]+$", result.stdout, re.MULTILINE)) == 2
    (sweep,) = (tmp_path / "runs/sweeps").iterdir()
    assert "train.lr=1e-4,2e-4" in (sweep / "multirun.yaml").read_text()
    assert (sweep / "multirun.yaml").stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_the_doctor_names_packages_cores_gpus_and_tracking(tmp_path: Path) -> None:
    result = launch(tmp_path, "task=doctor")
    assert result.returncode == 0, result.stderr
    for part in ("torch", "transformers", "ray", "cores", "GPUs", "W&B"):
        assert any(line.startswith(part) for line in result.stdout.splitlines()), part
    assert not list(tmp_path.iterdir())


def test_the_doctor_examines_where_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "GPUs            unknown without torch" in doctor()


def test_the_doctor_says_what_to_type_for_what_is_missing() -> None:
    assert line_of("no-such-package") == "no-such-package missing; type: pip install -e ."


def test_the_doctor_says_how_to_get_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"peft            {importlib.metadata.version('peft')}\n" in doctor()
    monkeypatch.setattr("grmpipe.doctor.version_of", lambda package: None)
    assert 'peft            not installed; for adapters (LoRA) type `pip install -e ".[lora]"`\n' in doctor()


def test_an_unknown_task_is_told_the_known_ones(tmp_path: Path) -> None:
    result = launch(tmp_path, "task=deploy")
    assert result.returncode == 2
    assert result.stderr.startswith("grmpipe: task: unknown task 'deploy'; known: train, ")
