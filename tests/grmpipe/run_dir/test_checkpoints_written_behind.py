"""A checkpoint is published when all trained models have written their part, and a failed write fails the run."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from grmpipe.models.stored_files import StoredFile, describe_files
from grmpipe.pipeline.interfaces import PipelineState
from grmpipe.run_dir.checkpoints import Checkpoints, CheckpointWriter
from grmpipe.run_dir.run_state import RunState


class Learner:
    """Writes when the test lets its disk write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.disk: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def saved(self) -> tuple[StoredFile, ...]:
        await self.disk
        self._folder.mkdir()
        (self._folder / "__0_0.distcp").write_text("weights")
        return describe_files(self._folder, ["__0_0.distcp"])


def state(step: int) -> RunState:
    return RunState(pipeline_state=PipelineState(version=step), wall_s=1.0, totals={}, busy_s={})


def begin(writer: CheckpointWriter, checkpoints: Checkpoints, step: int) -> tuple[Learner, Learner]:
    draft = checkpoints.draft(step)
    policy, critic = Learner(draft / "learner"), Learner(draft / "critic")
    writer.publish_when_written(draft, state(step), {"learner": policy, "critic": critic})
    return policy, critic


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_checkpoint_is_published_when_all_of_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")  # which can't be synced

    async def run() -> None:
        checkpoints = Checkpoints(directory=tmp_path / "checkpoints", keep=2)
        writer = CheckpointWriter(checkpoints)
        policy, critic = begin(writer, checkpoints, 2)
        policy.disk.set_result(None)
        await turns()
        writer.check()
        assert checkpoints.find().checkpoint is None, "the critic's is still written"
        critic.disk.set_result(None)
        await writer.settle()
        assert checkpoints.find().checkpoint == tmp_path / "checkpoints" / "step_2"
        assert {path.name for path in (tmp_path / "checkpoints" / "step_2").iterdir()} == {
            "critic", "learner", "manifest.json", "run_state.json"
        }  # fmt: skip

    asyncio.run(run())


def test_failed_write_is_reported_at_the_next_step_and_publishes_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        checkpoints = Checkpoints(directory=tmp_path / "checkpoints", keep=2)
        writer = CheckpointWriter(checkpoints)
        policy, critic = begin(writer, checkpoints, 2)
        critic.disk.set_result(None)
        policy.disk.set_exception(OSError("no space left"))
        await turns()
        with pytest.raises(OSError, match="no space left"):
            writer.check()
        writer.check()  # it is raised only once
        assert checkpoints.find().checkpoint is None

    asyncio.run(run())


def test_run_dir_deleted_during_a_write_is_reported(tmp_path: Path) -> None:
    async def run() -> None:
        checkpoints = Checkpoints(directory=tmp_path / "run" / "checkpoints", keep=2)
        writer, draft = CheckpointWriter(checkpoints), checkpoints.draft(2)
        learner = Learner(draft / "learner")
        writer.publish_when_written(draft, dataclasses.replace(state(2), run_id="mine"), {"learner": learner})
        shutil.rmtree(tmp_path / "run")
        learner.disk.set_result(None)
        with pytest.raises(FileNotFoundError, match=r"run_dir: .*run was deleted or replaced during the run"):
            await writer.settle()

    asyncio.run(run())


def test_a_run_that_fails_lets_its_last_checkpoint_end_and_one_that_is_killed_does_not(tmp_path: Path) -> None:
    async def run() -> None:
        checkpoints = Checkpoints(directory=tmp_path / "checkpoints", keep=2)
        writer = CheckpointWriter(checkpoints)
        begin(writer, checkpoints, 2)
        await writer.close(wait=False)
        assert checkpoints.find().checkpoint is None
        for learner in begin(writer, checkpoints, 4):
            learner.disk.set_result(None)
        await writer.close(wait=True)
        assert checkpoints.find().checkpoint == tmp_path / "checkpoints" / "step_4"

    asyncio.run(run())


def test_journals_are_on_the_disk_before_latest_names_a_checkpoint_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of the calls: what a power failure leaves can't be tried here."""
    calls, open_, replace = list[str](), os.open, os.replace
    paths: dict[int, str] = {}

    def opened(path: str, *args: int, **kwargs: int) -> int:
        descriptor = open_(path, *args, **kwargs)
        paths[descriptor] = Path(path).name
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(paths[descriptor]))
    monkeypatch.setattr(os, "replace", lambda source, target: (calls.append("-> latest"), replace(source, target)))
    (tmp_path / "cotrain").mkdir()
    journals = ["rollouts.jsonl", "trained.jsonl", "metrics.jsonl", "cotrain/groups.jsonl"]
    for name in journals:
        (tmp_path / name).write_text("{}\n")

    async def run() -> None:
        checkpoints = Checkpoints(directory=tmp_path / "checkpoints", keep=2)
        writer = CheckpointWriter(checkpoints)
        for model in begin(writer, checkpoints, 2):
            model.disk.set_result(None)
        await writer.settle()

    asyncio.run(run())
    synced = calls[: calls.index("-> latest")]
    assert {Path(name).name for name in journals} <= set(synced)
