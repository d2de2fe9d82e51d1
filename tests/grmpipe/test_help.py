"""What the bare command, --help and --version print, and what they don't wait for."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grmpipe
from grmpipe.help import GROUPS, write_help

ROOT = Path(__file__).parents[2]


def run(*typed: str, folder: Path = ROOT) -> str:
    script = (
        f"import sys; sys.argv = ['grmpipe', *{typed!r}]\nfrom grmpipe.command import main\nmain()\n"
        "print('slow:', sorted({'hydra', 'omegaconf', 'torch', 'ray'} & sys.modules.keys()))"
    )
    return subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("typed", [(), ("help",), ("--help",), ("+experiment=quickstart", "-h")])
def test_help_runs_nothing_and_imports_nothing_that_takes_time(typed: tuple[str, ...]) -> None:
    printed = run(*typed)
    assert printed.startswith("grmpipe post-trains") and printed.endswith("slow: []\n")
    docs = Path(printed.splitlines()[-2].rpartition(" in ")[2])
    assert {"configuration.md", "index.md"} <= {page.name for page in docs.iterdir()}


def test_the_version_is_ours() -> None:
    assert run("--version") == f"grmpipe {grmpipe.__version__}\nslow: []\n"


def test_every_group_of_choices_is_explained_and_whole() -> None:
    groups = {folder.name: folder for folder in (ROOT / "conf").iterdir() if folder.is_dir()}
    assert set(GROUPS) == set(groups)
    lines = write_help().partition("Choices")[2].splitlines()
    for name, folder in groups.items():
        at = next(index for index, line in enumerate(lines) if line.startswith(f"  {name} "))
        block = itertools.takewhile(lambda line: line.startswith("     "), lines[at + 1 :])
        assert set(re.findall(r"\w+", " ".join(block))) == {file.stem for file in folder.glob("*.yaml")}


def test_choices_of_a_project_stand_among_ours(tmp_path: Path) -> None:
    (tmp_path / "grmpipe.yaml").write_text("conf: mine", encoding="utf-8")
    for file in ("judge/my_judge.yaml", "experiment/my_run.yaml", "own/first.yaml"):
        path = tmp_path / "mine" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    printed = run(folder=tmp_path)
    assert "my_judge" in printed and "my_run" in printed and "  own          your own\n" in printed
