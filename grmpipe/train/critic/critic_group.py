"""All ranks of a critic, as the driver sees them: one critic."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import cast

import numpy as np

from grmpipe.train.critic.value_samples import SequenceRound, ValueRound
from grmpipe.train.sample_groups import SampleGroups
from grmpipe.train.saving import files_of_save
from grmpipe.types import Metrics
from models.stored_files import StoredFile
from scheduler.events import EventSink, NoEvents
from scheduler.processes.actors import ActorGroup
from scheduler.stage import BusyMeter

LANE = "critic"


class CriticGroup:
    """Each actor holds one rank's CriticLearner. Every method reaches all ranks, one call at a time.

    Calls of several tasks may overlap: each goes out to all ranks at once, so all ranks see the same order.

    Neighbouring ranks may share samples: they get the same batch, and the first of them answers for all.
    """

    def __init__(self, actors: ActorGroup, events: EventSink | None = None, cp: int = 1) -> None:
        """cp: the ranks that share each sample."""
        self._actors = actors
        self._groups = SampleGroups(actors, cp)
        self._events = events or NoEvents()
        self._meter = BusyMeter()
        self._version = 0

    @property
    def dp_size(self) -> int:
        """The number of batches in a round: ranks, or groups of ranks that share samples."""
        return self._groups.dp_size

    @property
    def version(self) -> int:
        """Optimizer steps requested so far: later requests use the weights after them."""
        return self._version

    @property
    def busy_s(self) -> float:
        """Seconds with a call in progress."""
        return self._meter.busy_s

    async def scores(self, round_: SequenceRound) -> list[np.ndarray]:
        """The head's output at each packed token, by batch."""
        each = [(sequences,) for sequences in round_]
        return cast(list[np.ndarray], await self._call("values", self._groups.call_each("scores", each)))

    async def accumulate(self, round_: ValueRound) -> None:
        """Forward and backward on a round."""
        await self._call("accumulate", self._groups.call_each("accumulate", [(batch,) for batch in round_]))

    async def step(self) -> Metrics:
        """End the batch. Raises NonFiniteGradients with the batch discarded."""
        self._version += 1
        metrics = await self._call(f"step {self._version}", self._actors.call_all("step"))
        return cast(list[Metrics], metrics)[0]

    async def discard(self) -> None:
        await self._actors.call_all("discard")

    async def begin_save(self, path: str, *, aside: bool) -> None:
        """Begin to save the current state; training may continue when this returns, with `aside` long before all is
        written.
        """
        await self._actors.call_all("begin_save" if aside else "save", path)

    async def saved(self) -> tuple[StoredFile, ...]:
        """Wait until the save is on the disk. Returns all its files."""
        return await files_of_save(self._actors)

    async def load(self, path: str) -> int:
        """Load a saved state; returns its version."""
        versions = cast(list[int], await self._actors.call_all("load", path))
        assert len(set(versions)) == 1, "all ranks read the same checkpoint"
        self._version = versions[0]
        return self._version

    async def export(self, path: str) -> None:
        await self._actors.call_all("export", path)

    async def _call(self, name: str, call: Awaitable[list[object]]) -> list[object]:
        began_s = asyncio.get_running_loop().time()
        with self._meter:
            answers = await call
        self._events.span(LANE, name, began_s, asyncio.get_running_loop().time())
        return answers
