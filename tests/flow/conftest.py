"""Whole runs in this process: compose as launch.py does, run the task, open the files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import launch  # noqa: F401  registers the schema
from grmpipe.config.run_config import RunConfig
from grmpipe.config.yaml_io import build
from grmpipe.tasks import run_task

ROOT = Path(__file__).parents[2]
# Small enough for a test: a step takes a second.
SMALL = (
    "cluster=inprocess", "tracking=none", "train.num_steps=3", "train.groups_per_batch=4",
    "train.group_size=4", "data.num_prompts=64", "data.num_eval_prompts=16", "judge.anchors=8",
    "tracking.console=false", "watch.every=0",
)  # fmt: skip


class RunFiles:
    """What a run left behind."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @property
    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / f"{name}.jsonl").read_text().splitlines()]

    def steps(self) -> list[dict]:
        """metrics.jsonl without the look before the first step."""
        return [line for line in self.lines("metrics") if "time/step_s" in line]


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", list(overrides)))


@pytest.fixture
def small_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_logging: None
) -> Iterator[Callable[..., RunFiles]]:
    """Run the quickstart, or another experiment, small and with overrides; returns its files."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str, experiment: str = "quickstart", run_dir: str = "run") -> RunFiles:
        run_task(composed(f"+experiment={experiment}", *SMALL, f"run_dir={run_dir}", *overrides))
        return RunFiles(tmp_path / run_dir)

    yield run
    logging.captureWarnings(False)  # a run takes them for itself
