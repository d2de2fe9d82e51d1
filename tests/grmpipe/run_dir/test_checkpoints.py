"""Checkpoints are whole or absent, whatever happens during a publication, and damage is noticed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grmpipe.models.stored_files import describe_files
from grmpipe.pipeline.interfaces import PipelineState
from grmpipe.run_dir.checkpoints import Checkpoints, load_state
from grmpipe.run_dir.run_state import RunState

SYSTEM_CALLS = ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir")


class Killed(BaseException):
    """Like kill -9: no handler of ours catches it."""


def state(version: int, wall_s: float = 1.0) -> RunState:
    return RunState(pipeline_state=PipelineState(version=version), wall_s=wall_s, totals={}, busy_s={})


def publish(checkpoints: Checkpoints, step: int, wall_s: float = 1.0) -> Path:
    draft = checkpoints.draft(step)
    (draft / "learner").mkdir()
    (draft / "learner" / "__0_0.distcp").write_bytes(bytes(range(256)) * 64)
    return checkpoints.publish(draft, state(step, wall_s), describe_files(draft, ["learner/__0_0.distcp"]))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_latest_checkpoint_is_a_whole_one_and_old_ones_are_forgotten(tmp_path: Path) -> None:
    checkpoints = Checkpoints(directory=tmp_path, keep=2)
    assert checkpoints.find().checkpoint is None
    for step in (2, 4, 10):
        publish(checkpoints, step)
    (checkpoints.draft(12) / "weights").write_text("half")
    assert checkpoints.find().checkpoint == tmp_path / "step_10"
    assert load_state(tmp_path / "step_10").pipeline_state.version == 10
    assert names(tmp_path) == ["latest", "step_10", "step_12.draft", "step_4"]


def test_a_kill_at_any_point_of_a_publication_leaves_a_whole_checkpoint_under_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same step is published twice, without another checkpoint to fall back to: a kill before each system call."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and not needed here
    for keep, second in ((1, 4), (2, 4), (1, 6)):
        for point in range(1000):
            directory = tmp_path / f"{keep}-{second}-{point}"
            checkpoints = Checkpoints(directory=directory, keep=keep)
            publish(checkpoints, 4)
            if not killed(lambda: publish(checkpoints, second, 2.0), point, monkeypatch):  # noqa: B023
                break
            found = checkpoints.find()
            assert found.checkpoint is not None, f"nothing is left of a kill before call {point}"
            assert found.damaged == (), "`latest` names a whole one"
            assert load_state(found.checkpoint).pipeline_state.version in (4, second)
            publish(checkpoints, second, 3.0)  # and the run continues
            assert load_state(checkpoints.find().checkpoint or Path()).wall_s == 3.0
            assert len([name for name in names(directory) if name.startswith(f"step_{second}")]) == 1
        assert point > 10, "all of them were tried"


def killed(work: Callable[[], object], point: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the work was killed before its `point`-th call that changes files; False if it ended earlier."""
    left = point

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def dying(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return call(*args, **kwargs)

        return dying

    with monkeypatch.context() as patched:
        for name in SYSTEM_CALLS:
            patched.setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        except Killed:
            return True
    return False


def test_files_are_on_the_disk_before_latest_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    at_rename: list[set[str]] = []
    paths: dict[int, str] = {}
    open_, fsync, replace = os.open, os.fsync, os.replace

    def opened(path: str, *args: int, **kwargs: int) -> int:
        descriptor = open_(path, *args, **kwargs)
        paths[descriptor] = Path(path).name
        return descriptor

    def replaced(source: Path, target: Path) -> None:
        at_rename.append(set(synced))
        replace(source, target)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(paths[descriptor]), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", replaced)
    publish(Checkpoints(directory=tmp_path / "checkpoints", keep=1), 4)
    assert at_rename == [{"run_state.json", "manifest.json", "learner", "step_4.draft", "checkpoints", "latest.draft"}]


def zero(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(4096)
        stream.write(bytes(4096))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "latest empty": (lambda top: (top / "latest").write_text(""), "latest names ''"),
    "latest with NULs": (lambda top: (top / "latest").write_bytes(bytes(6)), "which is not a checkpoint"),
    "latest out of the folder": (lambda top: (top / "latest").write_text("../step_4"), "which is not a checkpoint"),
    "latest a folder": (lambda top: ((top / "latest").unlink(), (top / "latest").mkdir()), "can't be read (Is a dir"),
    "latest to nothing": (lambda top: (top / "latest").write_text("step_9"), "names step_9, which doesn't exist"),
    "state empty": (lambda top: os.truncate(top / "step_4/run_state.json", 0), r"step_4: run_state.json has 0 bytes"),
    "state cut": (lambda top: os.truncate(top / "step_4/run_state.json", 40), r"step_4: run_state.json has 40 bytes"),
    "state gone": (lambda top: (top / "step_4/run_state.json").unlink(), "step_4: run_state.json is missing"),
    "state flipped": (lambda top: flip(top / "step_4/run_state.json"), "step_4: run_state.json was changed after"),
    "shard empty": (lambda top: os.truncate(top / "step_4/learner/__0_0.distcp", 0), "__0_0.distcp has 0 bytes"),
    "shard zeroed": (lambda top: zero(top / "step_4/learner/__0_0.distcp"), "__0_0.distcp was changed after"),
    "shard flipped": (lambda top: flip(top / "step_4/learner/__0_0.distcp"), "__0_0.distcp was changed after"),
    "learner gone": (lambda top: shutil.rmtree(top / "step_4/learner"), "learner/__0_0.distcp is missing"),
    "manifest gone": (lambda top: (top / "step_4/manifest.json").unlink(), "step_4: manifest.json is missing"),
    "manifest cut": (lambda top: os.truncate(top / "step_4/manifest.json", 50), "step_4: manifest.json can't be read"),
    "manifest flipped": (lambda top: flip(top / "step_4/manifest.json"), "step_4: "),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_reported_and_the_newest_whole_one_is_loaded(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(directory=tmp_path, keep=3)
    for step in (0, 2, 4):
        publish(checkpoints, step)
    do, told = DAMAGES[damage]
    do(tmp_path)
    found = checkpoints.find()
    expected = "step_4" if damage.startswith("latest") else "step_2"
    assert found.checkpoint == tmp_path / expected
    assert len(found.damaged) == 1
    assert told in found.damaged[0]


def test_where_nothing_is_whole_nothing_is_taken(tmp_path: Path) -> None:
    checkpoints = Checkpoints(directory=tmp_path, keep=2)
    for step in (2, 4):
        publish(checkpoints, step)
        flip(tmp_path / f"step_{step}/learner/__0_0.distcp")
    found = checkpoints.find()
    assert found.checkpoint is None
    assert [told.split(":")[0] for told in found.damaged] == ["step_4", "step_2"]


def test_files_of_users_next_to_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(directory=tmp_path, keep=1)
    strays = ["step_2 (copy)", "step_2.bak", "step_2_keep", "step_best", "step_best.draft"]
    publish(checkpoints, 2)
    for stray in strays:
        shutil.copytree(tmp_path / "step_2", tmp_path / stray)
    (tmp_path / "step_9").write_text("a file")
    publish(checkpoints, 4)
    assert names(tmp_path) == sorted([*strays, "latest", "step_4", "step_9"])
    assert checkpoints.find().checkpoint == tmp_path / "step_4"


def test_drafts_of_saves_that_were_killed_go_with_the_next_publication(tmp_path: Path) -> None:
    checkpoints = Checkpoints(directory=tmp_path, keep=1)
    for step in (2, 3, 4):
        (checkpoints.draft(step) / "weights").write_text("half")
    publish(checkpoints, 5)
    assert names(tmp_path) == ["latest", "step_5"]


def test_checkpoints_of_a_lineage_that_ended_do_not_outlast_the_next_one(tmp_path: Path) -> None:
    """After falling back to step 2 the run trains again: the old step 6 belongs to another history."""
    checkpoints = Checkpoints(directory=tmp_path, keep=3)
    for step in (2, 6):
        publish(checkpoints, step)
    flip(tmp_path / "step_6/run_state.json")
    publish(checkpoints, 4)
    assert names(tmp_path) == ["latest", "step_2", "step_4"]
