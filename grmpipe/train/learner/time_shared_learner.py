"""The learner of a time-shared pool, on the driver: it trains while it has the device."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import cast

from grmpipe.models.types import OnDevice
from grmpipe.pipeline.interfaces import TrainedBatch, Trainer
from grmpipe.scheduler.slots.time_share import TimeShare
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.types import JudgedGroup, Metrics

LearnerPhase = Callable[[], AbstractAsyncContextManager[object]]


class TimeSharedLearnerRanks(LearnerRanks):
    """All ranks of a learner with a time-shared device. Work that needs its whole state between steps takes a phase for
    it.
    """

    learner_phase: LearnerPhase | None = None  # until it is set, the state is where it was made

    async def keep_on_device(self, on_device: OnDevice) -> int:
        """Call it on all ranks. Returns the sum of the bytes that became free."""
        return sum(cast(list[int], await self._actors.call_all("keep_on_device", on_device)))

    async def begin_save(self, path: str, *, in_background: bool) -> None:
        async with self._own_phase():
            await super().begin_save(path, in_background=in_background)

    async def load(self, path: str) -> int:
        async with self._own_phase():
            return await super().load(path)

    async def export(self, path: str) -> None:
        async with self._own_phase():
            await super().export(path)

    @asynccontextmanager
    async def _own_phase(self) -> AsyncIterator[None]:
        if self.learner_phase is None:
            yield
            return
        async with self.learner_phase():
            yield


def begin_learner_phase(share: TimeShare) -> Callable[[], Awaitable[Metrics]]:
    """A function that begins the phase of a step, and returns as metrics the bytes that became free for the learner."""

    async def begin() -> Metrics:
        await share.to_learner()
        return {f"memory/freed_by_{who}_gb": num_bytes / 1e9 for who, num_bytes in share.freed_bytes.items()}

    return begin


class TimeSharedTrainer:
    """Keeps the groups of a batch until the learner has its device, then trains on them in their order, without an
    early start. The phase that a step begins ends with the push of its weights.

    begin_learner_phase: begins the learner's phase; returns, as metrics, the bytes that became free.
    """

    def __init__(self, trainer: Trainer, begin_learner_phase: Callable[[], Awaitable[Metrics]]) -> None:
        self._trainer = trainer
        self._begin_learner_phase = begin_learner_phase

    async def take(self, group: JudgedGroup) -> None:
        return None  # the engines have the device

    async def while_waiting(self) -> bool:
        return False  # as above

    async def step(self, batch: Sequence[JudgedGroup]) -> TrainedBatch:
        freed = await self._begin_learner_phase()
        for group in batch:
            await self._trainer.take(group)
        trained = await self._trainer.step(batch)
        return replace(trained, metrics=trained.metrics | freed)

    async def discard(self) -> None:
        await self._trainer.discard()
