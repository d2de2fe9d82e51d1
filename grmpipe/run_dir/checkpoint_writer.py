"""A run's checkpoints while they are written beside its training: one at a time, published when whole. Begins none."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from grmpipe.run_dir.checkpoints import Checkpoints
from grmpipe.run_dir.run_state import RunState
from models.stored_files import StoredFile

log = logging.getLogger(__name__)


class Saving(Protocol):
    """All ranks of what learns, with a save under way."""

    async def saved(self) -> tuple[StoredFile, ...]: ...


class CheckpointWriter:
    """Publishes a draft once everybody's files are on the disk. check() and settled() raise what a write raised."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._writing: asyncio.Task[None] | None = None

    def publish_when_written(self, draft: Path, state: RunState, folders: Mapping[str, Saving]) -> None:
        """folders: of the draft, and who writes there."""
        assert self._writing is None, "one at a time"
        self._writing = asyncio.create_task(self._publish(draft, state, folders), name="checkpoint")

    def check(self) -> None:
        """To be called between steps: a write that failed fails the run."""
        if self._writing is not None and self._writing.done():
            ended, self._writing = self._writing, None
            ended.result()

    async def settled(self) -> None:
        """Wait until nothing is under way."""
        if self._writing is not None:
            ended, self._writing = self._writing, None
            await ended

    async def close(self, *, wait: bool) -> None:
        """At the end of a run that failed: its last checkpoint may be whole in a moment. Raises nothing."""
        if self._writing is not None and not wait:
            self._writing.cancel()
        try:
            await self.settled()
        except asyncio.CancelledError:
            return
        except Exception as error:
            log.warning("the last checkpoint was not published: %s", error)

    async def _publish(self, draft: Path, state: RunState, folders: Mapping[str, Saving]) -> None:
        files: list[StoredFile] = []
        for folder, learner in folders.items():
            files += [dataclasses.replace(file, name=f"{folder}/{file.name}") for file in await learner.saved()]
        self._checkpoints.publish(draft, state, files)
