"""Waits for a save that ranks write while they train."""

from __future__ import annotations

import asyncio
from typing import cast

from models.stored_files import StoredFile
from scheduler.processes.actors import ActorGroup

FIRST_POLL_S, LAST_POLL_S = 0.01, 1.0  # a rank answers between its other calls, so the interval grows


async def files_of_save(actors: ActorGroup) -> tuple[StoredFile, ...]:
    """The files that all ranks wrote. Raises the error of a failed write."""
    poll_s = FIRST_POLL_S
    while True:
        files_by_rank = cast(list[tuple[StoredFile, ...] | None], await actors.call_all("saved"))
        if None not in files_by_rank:
            return tuple(file for files in files_by_rank if files is not None for file in files)
        await asyncio.sleep(poll_s)
        poll_s = min(2 * poll_s, LAST_POLL_S)
