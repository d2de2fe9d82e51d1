"""Any end of a task is in its summary, and its processes end with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from configs import run_config

from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.tracking import TrackingConfig
from grmpipe.observe.summary import EvalSummary, Status, Summary
from grmpipe.run.run_context import Run, RunContext, run_in_directory
from grmpipe.run_dir.recovery import BEGINNING


@dataclass
class Prepared:
    config: RunConfig
    work: Callable[[], Any]
    closed: list[str] = field(default_factory=list)


class Task(Run[Prepared]):
    """Two steps, then what the test sets."""

    async def run(self) -> Status:
        self._steps = 2
        return await self._prepared.work() or "completed"

    def results(self) -> Summary:
        evaluated = EvalSummary(final={"true_accuracy": 0.5})
        return Summary(steps=self._steps, versions={}, eval=evaluated)

    async def after_failure(self, error: Exception) -> str:
        return f"\nsaved after {type(error).__name__}"

    async def close(self) -> None:
        self._prepared.closed.append("closed")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("kept: 1\n")
    (tmp_path / "summary.json").write_text('{"status": "interrupted"}')
    return tmp_path


def end_of(work: Callable[[], Any], run_dir: Path, **changes: Any) -> tuple[Summary, Prepared]:
    config = run_config(tracking=TrackingConfig(trackers=[], console=False))
    prepared = Prepared(replace(config, **changes), work)
    return asyncio.run(run_in_directory(Task, prepared, run_dir)), prepared


def written(run_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return record


async def nothing() -> None:
    return None


async def broken() -> None:
    raise ValueError("no such thing")


async def wrongly_configured() -> None:
    raise ConfigError("judge.template: can't be read")


async def signalled() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(5)


def test_an_end_is_written_with_its_objective(run_dir: Path) -> None:
    summary, prepared = end_of(nothing, run_dir, objective="eval.final.true_accuracy")
    assert (summary.status, summary.objective, prepared.closed) == ("completed", 0.5, ["closed"])
    assert written(run_dir)["objective"] == 0.5


def test_an_objective_that_the_run_has_not_is_null(run_dir: Path) -> None:
    assert end_of(nothing, run_dir, objective="eval.initial.true_accuracy")[0].objective is None


def test_a_failure_is_written_with_what_was_saved(run_dir: Path) -> None:
    summary, prepared = end_of(broken, run_dir)
    assert summary.failure == "no such thing\nsaved after ValueError"
    assert written(run_dir)["status"] == "failed"
    assert prepared.closed == ["closed"]


def test_sigterm_is_an_interruption_of_every_task(run_dir: Path) -> None:
    summary, prepared = end_of(signalled, run_dir)
    assert (summary.status, written(run_dir)["steps"], prepared.closed) == ("interrupted", 2, ["closed"])


def test_a_refusal_is_raised_and_leaves_the_directory_free(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"judge\.template"):
        end_of(wrongly_configured, run_dir)
    assert not (run_dir / "config.yaml").exists()
    assert not (run_dir / "summary.json").exists()


def test_a_task_knows_where_it_writes(run_dir: Path) -> None:
    found: list[RunContext] = []

    class Looks(Task):
        async def run(self) -> Status:
            found.append(self._context)
            return await super().run()

    config = run_config(tracking=TrackingConfig(trackers=[], console=False))
    asyncio.run(run_in_directory(Looks, Prepared(config, nothing), run_dir))
    assert (found[0].run_dir, found[0].resumed, found[0].state) == (run_dir, None, BEGINNING)
