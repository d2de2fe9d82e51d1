"""All ranks of a critic, as the driver sees them: one critic."""

import asyncio
from collections.abc import Awaitable
from typing import cast

import numpy as np

from grmpipe.scheduler.events import EventSink, NoEvents
from grmpipe.scheduler.processes.actors import ActorRanks
from grmpipe.scheduler.work_queue import BusyMeter
from grmpipe.train.critic.value_samples import SequenceRound, ValueRound
from grmpipe.train.ranks import Ranks
from grmpipe.types import Metrics

LANE = "critic"


class CriticLearnerRanks(Ranks):
    """Each actor holds one rank's CriticLearner."""

    def __init__(self, actors: ActorRanks, events: EventSink | None = None, cp: int = 1) -> None:
        super().__init__(actors, cp)
        self._events = events or NoEvents()
        self._meter = BusyMeter()

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
        return cast(list[np.ndarray], await self._call("values", self._call_each("scores", each)))

    async def accumulate(self, round_: ValueRound) -> None:
        """Forward and backward on a round."""
        await self._call("accumulate", self._call_each("accumulate", [(batch,) for batch in round_]))

    async def step(self) -> Metrics:
        """End the batch. Raises NonFiniteGradients with the batch discarded."""
        self._version += 1
        metrics = await self._call(f"step {self._version}", self._actors.call_all("step"))
        return cast(list[Metrics], metrics)[0]

    async def discard(self) -> None:
        await self._actors.call_all("discard")

    async def _call(self, name: str, call: Awaitable[list[object]]) -> list[object]:
        began_s = asyncio.get_running_loop().time()
        with self._meter:
            answers = await call
        self._events.span(LANE, name, began_s, asyncio.get_running_loop().time())
        return answers
