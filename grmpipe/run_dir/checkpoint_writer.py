"""Writes checkpoints while training continues: one at a time, published when complete."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from grmpipe.models.stored_files import StoredFile, sync_file
from grmpipe.run_dir.checkpoints import Checkpoints
from grmpipe.run_dir.identity import check_is_there
from grmpipe.run_dir.run_state import RunState

log = logging.getLogger(__name__)


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
