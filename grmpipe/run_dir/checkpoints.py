"""`checkpoints/` of a run: publishes each whole or not at all, finds the newest whole one, and writes while training
continues, one at a time.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grmpipe.models.stored_files import StoredFile, describe_files, first_difference, sync_directory, sync_file
from grmpipe.run_dir.identity import check_is_there
from grmpipe.run_dir.run_state import RunState

log = logging.getLogger(__name__)

STATE_FILE = "run_state.json"
MANIFEST_FILE = "manifest.json"
LATEST_FILE = "latest"
PUBLISHED = re.compile(r"step_(\d+)(?:\.(\d+))?")  # a step that is published again becomes step_N.1, and so on
DRAFT_SUFFIX = ".draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The checkpoints found. checkpoint: the newest whole one, or None. damaged: newer ones that were skipped, and
    why.
    """

    checkpoint: Path | None
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """`checkpoints/step_N/` of a run, and the file that names the latest one.

    A directory gets such a name only when it is complete and on the disk. Everything else in there is ignored.
    """

    directory: Path
    keep: int

    def draft(self, step: int) -> Path:
        """An empty directory to write a checkpoint into. Published checkpoints of this step stay unchanged
        meanwhile.
        """
        there = [_order(path) for path in self.list_published() if _order(path)[0] == step]
        name = f"step_{step}.{max(there)[1] + 1}" if there else f"step_{step}"
        draft = self.directory / f"{name}{DRAFT_SUFFIX}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        return draft

    def publish(self, draft: Path, state: RunState, files: Sequence[StoredFile]) -> Path:
        """Make a draft the latest checkpoint, by one rename, and then by renaming the file that names it. Then delete
        older ones.

        files: all files in the draft, synced to the disk.
        """
        (draft / STATE_FILE).write_text(state.to_json(), encoding="utf-8")
        _write_manifest(draft, [*files, *describe_files(draft, [STATE_FILE])])
        for path in (draft / STATE_FILE, draft / MANIFEST_FILE):
            sync_file(path)
        for folder in {(draft / file.name).parent for file in files} | {draft}:
            sync_directory(folder)
        whole = draft.with_name(draft.name.removesuffix(DRAFT_SUFFIX))
        draft.rename(whole)
        sync_directory(self.directory)
        self._point_at(whole)
        self._forget_others(whole)
        return whole

    def find(self) -> Found:
        """The checkpoint that `latest` names if it is whole, otherwise the newest whole one."""
        pointed, damaged = self._pointed()
        newest_first = sorted(self.list_published(), key=_order, reverse=True)
        candidates = [path for path in newest_first if path == pointed]
        for path in candidates + [path for path in newest_first if path != pointed]:
            difference = _difference(path)
            if difference is None:
                return Found(checkpoint=path, damaged=damaged)
            damaged += (f"{path.name}: {difference}",)
        return Found(checkpoint=None, damaged=damaged)

    def latest(self) -> Path | None:
        """The checkpoint that was published last, in this process or before."""
        return self._pointed()[0]

    def _point_at(self, whole: Path) -> None:
        pointer = self.directory / f"{LATEST_FILE}{DRAFT_SUFFIX}"
        pointer.write_text(whole.name, encoding="utf-8")
        sync_file(pointer)
        pointer.replace(self.directory / LATEST_FILE)
        sync_directory(self.directory)

    def _pointed(self) -> tuple[Path | None, tuple[str, ...]]:
        """The checkpoint that `latest` names, and what is wrong with it."""
        try:
            name = (self.directory / LATEST_FILE).read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:  # killed before the first was named
            return None, ()
        except OSError as error:
            return None, (f"{LATEST_FILE} can't be read ({error.strerror})",)
        if not PUBLISHED.fullmatch(name):
            return None, (f"{LATEST_FILE} names {name[:40]!r}, which is not a checkpoint",)
        pointed = self.directory / name
        return (pointed, ()) if pointed.is_dir() else (None, (f"{LATEST_FILE} names {name}, which doesn't exist",))

    def list_published(self) -> list[Path]:
        return [path for path in _folders(self.directory) if PUBLISHED.fullmatch(path.name)]

    def list_steps(self) -> list[int]:
        return [_order(path)[0] for path in self.list_published()]

    def _forget_others(self, newest: Path) -> None:
        """Delete checkpoints beyond `keep`, those that the newest replaces (the same step, later ones from before a
        resume), and drafts.
        """
        step, _ = _order(newest)
        older = sorted((path for path in self.list_published() if _order(path)[0] < step), key=_order)
        replaced = [path for path in self.list_published() if _order(path)[0] >= step and path != newest]
        for path in [*older[: max(0, len(older) - self.keep + 1)], *replaced, *self._drafts()]:
            shutil.rmtree(path, ignore_errors=True)

    def _drafts(self) -> Iterable[Path]:
        for path in _folders(self.directory):
            if path.name.endswith(DRAFT_SUFFIX) and PUBLISHED.fullmatch(path.name.removesuffix(DRAFT_SUFFIX)):
                yield path


def load_state(checkpoint: Path) -> RunState:
    return RunState.from_json((checkpoint / STATE_FILE).read_text(encoding="utf-8"))


def _folders(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []


def _order(published: Path) -> tuple[int, int]:
    """The step, and how often it was published before."""
    match = PUBLISHED.fullmatch(published.name)
    assert match is not None, "asked of published checkpoints only"
    return int(match[1]), int(match[2] or 0)


def _write_manifest(draft: Path, files: Sequence[StoredFile]) -> None:
    listed = {"files": [dataclasses.asdict(file) for file in files]}
    (draft / MANIFEST_FILE).write_text(json.dumps(listed, indent=1), encoding="utf-8")


def _difference(checkpoint: Path) -> str | None:
    """The difference of a published checkpoint from what was written; None if there is none."""
    try:
        listed = json.loads((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))
        files = [StoredFile(**file) for file in listed["files"]]
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{MANIFEST_FILE} can't be read ({error})"
    if STATE_FILE not in {file.name for file in files}:
        return f"{MANIFEST_FILE} lists no {STATE_FILE}"
    return first_difference(checkpoint, files)


class Saving(Protocol):
    """All ranks of a trained model, with a save in progress."""

    async def saved(self) -> tuple[StoredFile, ...]: ...


class CheckpointWriter:
    """Publishes a draft once the files of all ranks are on the disk. check() and settled() raise the error of a failed
    write.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._writing: asyncio.Task[None] | None = None

    def publish_when_written(self, draft: Path, state: RunState, folders: Mapping[str, Saving]) -> None:
        """Publish a draft when it is written. folders: folder of the draft -> who writes there."""
        assert self._writing is None, "one at a time"
        self._writing = asyncio.create_task(self._publish(draft, state, folders), name="checkpoint")

    def check(self) -> None:
        """Raise the error of a failed write. Call it between steps."""
        if self._writing is not None and self._writing.done():
            ended, self._writing = self._writing, None
            ended.result()

    async def settle(self) -> None:
        """Wait until no save is in progress."""
        if self._writing is not None:
            ended, self._writing = self._writing, None
            await ended

    async def close(self, *, wait: bool) -> None:
        """Close at the end of a failed run, whose last checkpoint may be complete in a moment. Raises nothing."""
        if self._writing is not None and not wait:
            self._writing.cancel()
        try:
            await self.settle()
        except asyncio.CancelledError:
            return
        except Exception as error:
            log.warning("the last checkpoint was not published: %s", error)

    async def _publish(self, draft: Path, state: RunState, folders: Mapping[str, Saving]) -> None:
        files: list[StoredFile] = []
        try:
            for folder, learner in folders.items():
                files += [dataclasses.replace(file, name=f"{folder}/{file.name}") for file in await learner.saved()]
            # What the checkpoint counts is on the disk before it: a power failure loses only what came after.
            await asyncio.to_thread(sync_journals, self._checkpoints.directory.parent)
            self._checkpoints.publish(draft, state, files)
        except FileNotFoundError:
            check_is_there(self._checkpoints.directory.parent, state.run_id)
            raise


def sync_journals(run_dir: Path) -> None:
    """Return once all journals of a run are on the disk, as they are now. A link to a device is none."""
    for path in filter(Path.is_file, run_dir.rglob("*.jsonl")):
        with contextlib.suppress(FileNotFoundError):  # of a rollout that has just ended
            sync_file(path)
