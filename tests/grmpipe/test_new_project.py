"""task=new: what it writes runs and passes its tests; a project's files are found first, and replace no config.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Forked

import grmpipe
from grmpipe import cli
from grmpipe.config.io.project import find_project

ROOT = Path(__file__).parents[2]
SMALL = ("tracking=none", "tracking.console=false", "run_dir=run", "train.num_steps=1", "train.groups_per_batch=2")
Typed = Callable[..., int]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Typed:
    """`typed(*words)`: the command in tmp_path. Returns its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))

    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["grmpipe", *words])
        try:
            return cli.main()
        except SystemExit as end:
            return int(str(end.code))

    return run


def test_a_new_project_passes_its_tests_and_its_experiments_run(
    tmp_path: Path, typed: Typed, forked: type[Forked], capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("task=new", "new.dir=mylab") == 0
    assert "cd mylab" in capsys.readouterr().out
    lab = tmp_path / "mylab"
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}  # its pytest knows no option of ours
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=lab, capture_output=True, text=True,
        check=False, env=env,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout + tests.stderr
    (lab / "below").mkdir()
    for experiment in ("mine", "game"):
        folder = lab / "below" / experiment
        folder.mkdir()
        run = forked(ROOT / "launch.py", f"+experiment={experiment}", "cluster=inprocess", *SMALL, cwd=folder)
        assert run.wait() == 0, run.output
        assert json.loads((folder / "run/summary.json").read_text())["status"] == "completed"


def test_folder_with_files_and_missing_folder_are_refused(
    tmp_path: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("task=new", f"new.dir={tmp_path}") == 0
    assert typed("task=new", f"new.dir={tmp_path}") == 2
    assert typed("task=new") == 2
    assert capsys.readouterr().err.splitlines() == [
        f"grmpipe: new.dir: {tmp_path} holds files; type a folder that is empty, or isn't there",
        "grmpipe: new.dir: names the folder of the new project; type new.dir=mylab",
    ]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "grmpipe.yaml").write_text("conf: settings\n")
    (tmp_path / "settings" / "experiment").mkdir(parents=True)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    return tmp_path


def test_a_project_is_searched_first_and_its_config_yaml_and_other_files_at_its_top_replace_none(project: Path) -> None:
    own = "# @package _global_\nexperiment_name: own\ndata: {path: '${project:mine.jsonl}'}\n"
    (project / "settings" / "experiment" / "quickstart.yaml").write_text(own)
    (project / "settings" / "config.yaml").write_text("nonsense: 1\n")
    (project / "settings" / "pretrained.yaml").write_text("nonsense: 1\n")
    config = grmpipe.compose("quickstart", ["policy=path", "policy.path=x"])
    assert config.experiment_name == "own"
    assert config.data.path == str(project / "mine.jsonl")
    assert grmpipe.compose("walk").experiment_name == "walk"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("conf: nowhere", "conf: there is no folder"),
        ("configs: settings", "must be `conf: <folder of configurations>`"),
        ("conf: [", "can't be read"),
    ],
)
def test_a_grmpipe_yaml_that_can_not_be_used_is_refused_by_its_path(project: Path, text: str, said: str) -> None:
    (project / "grmpipe.yaml").write_text(text)
    with pytest.raises(grmpipe.ConfigError) as error:
        find_project(Path.cwd())
    assert str(error.value).startswith(str(project / "grmpipe.yaml"))
    assert said in str(error.value)
