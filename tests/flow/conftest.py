"""Whole runs in this process: composes as launch.py does, runs the task, opens the files."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from forks import Forked
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import RunConfig
from grmpipe.observe.recorder import load_rollouts
from grmpipe.run.build.start_cluster import PRELOADED
from grmpipe.scheduler.placement import ClusterConfig, PlacementConfig, place
from grmpipe.scheduler.processes.fork_server import fork_workers
from grmpipe.tasks import run_task
from grmpipe.train.learner.learner import Learner
from grmpipe.types import Metrics, MicroBatch

ROOT = Path(__file__).parents[2]
# Small enough for a test: a step takes a second.
SMALL = (
    "cluster=inprocess", "tracking=none", "train.num_steps=3", "train.groups_per_batch=4",
    "train.group_size=4", "data.num_prompts=64", "data.num_eval_prompts=16", "judge_monitor.anchors=8",
    "tracking.console=false", "judge_monitor.every=0",
)  # fmt: skip


class RunFiles:
    """The files of a run."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @property
    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / f"{name}.jsonl").read_text().splitlines()]

    def steps(self) -> list[dict]:
        """metrics.jsonl without the evaluation before the first step."""
        return [line for line in self.lines("metrics") if "time/step_s" in line]

    def check_complete(self, groups: int) -> None:
        """All groups were trained; every rollout was judged once, and recorded; spans have no gaps; every push was
        confirmed.
        """
        assert self.summary["status"] == "completed", self.summary["failure"]
        assert self.summary["groups"] == {"submitted": groups, "trained": groups, "dropped": {}, "in_flight": 0}
        assert self.summary["judging"]["failed"] == {}
        rollouts = [line.rollout for line in load_rollouts(self.run_dir / "rollouts.jsonl")]
        keys = Counter((rollout.group_id, rollout.sibling) for rollout in rollouts)
        assert set(keys.values()) == {1}, "a rollout came twice"
        judged = Counter((line["group_id"], line["sibling"]) for line in self.lines("judgements"))
        assert judged == keys, "a verdict is missing or came twice"
        for rollout in rollouts:
            completion = rollout.turns[0].completion
            assert len(completion.token_ids) == len(completion.logprobs)
            ends = [0, *(span.end for span in completion.versions)]
            assert [span.start for span in completion.versions] == ends[:-1]
            assert ends[-1] == len(completion.token_ids)
        assert all(line["sync/probe_error_nats"] < 1e-3 for line in self.steps())


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", list(overrides)))


def run_small(directory: Path, *overrides: str, experiment: str = "quickstart", run_dir: str = "run") -> RunFiles:
    run_task(composed(f"+experiment={experiment}", *SMALL, f"run_dir={run_dir}", *overrides))
    return RunFiles(directory / run_dir)


@pytest.fixture
def small_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_logging: None
) -> Iterator[Callable[..., RunFiles]]:
    """Run the quickstart, or another experiment, in a small version and with overrides; returns its files."""
    monkeypatch.chdir(tmp_path)
    yield functools.partial(run_small, tmp_path)
    logging.captureWarnings(False)  # a run captures them itself


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[MicroBatch]:
    """Every micro-batch that a learner gets from now on."""
    seen: list[MicroBatch] = []
    accumulate = Learner.accumulate

    def watched(learner: Learner, micro_batch: MicroBatch, *old: object) -> Metrics:
        seen.append(micro_batch)
        return accumulate(learner, micro_batch, *old)  # type: ignore[arg-type]

    monkeypatch.setattr(Learner, "accumulate", watched)
    return seen


@pytest.fixture(scope="module")
def run_once(
    tmp_path_factory: pytest.TempPathFactory, keep_logging: Callable[[], AbstractContextManager[None]]
) -> Callable[..., RunFiles]:
    """Like small_run, for a run that several tests of a file read."""
    directory = tmp_path_factory.mktemp("once")

    def run(*overrides: str, **where: str) -> RunFiles:
        with pytest.MonkeyPatch.context() as patch, keep_logging():
            patch.chdir(directory)
            return run_small(directory, *overrides, **where)

    return run


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """One Ray for the runs of a file, which start and end their own processes on it."""
    from grmpipe.scheduler.processes.ray_cluster import RayCluster

    with fork_workers(PRELOADED):
        cluster = asyncio.run(RayCluster.start(ClusterConfig(), place(PlacementConfig(), ())))
        yield
        asyncio.run(cluster.shutdown())


@pytest.fixture
def launched(forked: type[Forked], tmp_path: Path) -> Callable[..., Forked]:
    """`launched(*overrides)`: a launch.py in tmp_path."""
    return functools.partial(forked, ROOT / "launch.py", cwd=tmp_path)
