"""The learner of a time-shared pool, on the driver: it trains while the device is its own. Decides no turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

from grmpipe.pipeline.interfaces import Trainer
from grmpipe.train.learner.learner_group import LearnerGroup
from grmpipe.types import JudgedGroup, Metrics
from models.types import Residence
from scheduler.slots.time_share import TimeShare

Turn = Callable[[], AbstractAsyncContextManager[object]]


class LearnerByTurns(LearnerGroup):
    """All ranks of a learner that lends its device. What needs its whole state between steps takes a turn for it."""

    turn: Turn | None = None  # until it is set there is nobody else yet: the state is where it was made

    async def reside(self, residence: Residence) -> int:
        """On all ranks; the sum of what became free."""
        return sum(cast(list[int], await self._actors.call_all("reside", residence)))

    async def begin_save(self, path: str, *, aside: bool) -> None:
        async with self._own_turn():
            await super().begin_save(path, aside=aside)

    async def load(self, path: str) -> int:
        async with self._own_turn():
            return await super().load(path)

    async def export(self, path: str) -> None:
        async with self._own_turn():
            await super().export(path)

    @asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[None]:
        if self.turn is None:
            yield
            return
        async with self.turn():
            yield


def begin_turn(share: TimeShare) -> Callable[[], Awaitable[Metrics]]:
    """For a step of the learner's: what became free for it, and of it when the engines went on."""

    async def begin() -> Metrics:
        await share.to_learner()
        return {f"memory/freed_by_{who}_gb": num_bytes / 1e9 for who, num_bytes in share.freed_bytes.items()}

    return begin


class TrainerByTurns:
    """Leaves the groups of a batch where they are until the learner has its device, then trains on them in the order
    they came: without an early start. The turn that a step begins ends with the push of its weights.

    begin_turn: returns, as metrics, what became free for it.
    """

    def __init__(self, trainer: Trainer, begin_turn: Callable[[], Awaitable[Metrics]]) -> None:
        self._trainer = trainer
        self._begin_turn = begin_turn

    async def take(self, group: JudgedGroup) -> None:
        return None  # the engines have the device

    async def while_waiting(self) -> bool:
        return False  # as above

    async def step(self, batch: Sequence[JudgedGroup]) -> Metrics:
        freed = await self._begin_turn()
        for group in batch:
            await self._trainer.take(group)
        return await self._trainer.step(batch) | freed

    async def discard(self) -> None:
        await self._trainer.discard()
