"""All ranks of a learner whose device is its own only by turns, as the driver sees them. Decides no turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

from grmpipe.train.learner_group import LearnerGroup
from models.types import Residence

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
