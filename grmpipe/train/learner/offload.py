"""The learner on one rank, on a device that it has only by turns: what of its state lies there. Trains as any other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

from torch import Tensor

from grmpipe.pipeline.interfaces import Trainer
from grmpipe.train.learner.learner import Learner, LearnerSpec
from grmpipe.train.learner.learner_group import LearnerGroup
from grmpipe.types import BatchTotals, JudgedGroup, Metrics, MicroBatch, OldPass
from models.lm.offload import LentMemory, free_bytes
from models.types import Residence, WeightBucket
from scheduler.slots.time_share import TimeShare


class LendingLearner(Learner):
    """Between its turns its state waits on the host: weights, the optimizer's moments, the reference. Gradients are
    gone by then: no turn ends within a batch."""

    def __init__(self, spec: LearnerSpec, rank: int = 0, world_size: int = 1, init_method: str | None = None) -> None:
        super().__init__(spec, rank, world_size, init_method)
        self._lent_weights = LentMemory()
        self._lent_rest = LentMemory()

    def accumulate(self, micro_batch: MicroBatch, old: OldPass | None = None) -> Metrics:
        self._assert_has_all()
        return super().accumulate(micro_batch, old)

    def step(self, totals: BatchTotals) -> Metrics:
        self._assert_has_all()
        return super().step(totals)

    def save(self, directory: str) -> None:
        self._assert_has_all()
        super().save(directory)

    def begin_save(self, directory: str) -> None:
        self._assert_has_all()
        super().begin_save(directory)

    def bucket(self, index: int) -> WeightBucket | None:
        self._assert_has_weights()
        return super().bucket(index)

    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        self._assert_has_weights()
        return super().score(token_ids)

    def reside(self, residence: Residence) -> int:
        """Returns the bytes that became free on the device; on a CPU everything is on the host anyway, and stays."""
        if self._device.type == "cpu":
            return 0
        before = free_bytes(self._device)
        self.lay_out(residence)
        return free_bytes(self._device) - before

    def lay_out(self, residence: Residence) -> None:
        """Take back first, lend then."""
        if residence != "nothing":
            self._lent_weights.take_back()
        if residence == "everything":
            self._lent_rest.take_back()
        if residence != "everything" and not self._lent_rest.is_lent:
            self._lent_rest.lend(self._state_but_weights())
        if residence == "nothing" and not self._lent_weights.is_lent:
            self._lent_weights.lend([*self._model.parameters(), *self._model.buffers()])

    def _assert_has_weights(self) -> None:
        assert not self._lent_weights.is_lent, "the learner's weights are on the host"

    def _assert_has_all(self) -> None:
        self._assert_has_weights()
        assert not self._lent_rest.is_lent, "the optimizer's state is on the host"

    def _state_but_weights(self) -> Iterator[Tensor]:
        """What a push can do without."""
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        if self._reference is not None:
            yield from self._reference.parameters()
            yield from self._reference.buffers()


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
