"""Calls of ranks of which neighbouring ones share samples. Knows no method and no sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.processes.actors import ActorGroup


@dataclass(frozen=True, slots=True)
class SampleGroups:
    """The ranks of a model in groups of `cp` neighbours: all ranks of a group get the same samples, and the first of
    them answers for all.
    """

    actors: ActorGroup
    cp: int = 1

    @property
    def dp_size(self) -> int:
        """The number of micro-batches in a round: ranks, or groups of ranks that share samples."""
        groups, rest = divmod(self.actors.size, self.cp)
        assert rest == 0, (self.actors.size, self.cp)
        return groups

    async def call_each(self, method: str, each: Sequence[tuple[object, ...]]) -> list[object]:
        """Call ranks with the arguments of each micro-batch. Returns an answer for each."""
        answers = await self.actors.call_each(method, [args for args in each for _ in range(self.cp)])
        return answers[:: self.cp]
