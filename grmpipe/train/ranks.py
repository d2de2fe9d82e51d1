"""All ranks of one trained model, as the driver sees them: their calls, version and saved state, and one value of the
metrics that each reports. Imports no torch.
"""

import asyncio
from collections.abc import Sequence
from typing import cast

from grmpipe.models.stored_files import StoredFile
from grmpipe.scheduler.processes.actors import ActorRanks
from grmpipe.types import Metrics

FIRST_POLL_S, LAST_POLL_S = 0.01, 1.0  # a rank answers between its other calls, so the interval grows


class Ranks:
    """Each actor holds one rank. Every method reaches all ranks, one call at a time.

    Calls of several tasks may overlap: each goes out to all ranks at once, so all ranks see the same order.

    Ranks are in groups of `cp` neighbours that share samples: all ranks of a group get the same ones, and the first of
    them answers for all.
    """

    def __init__(self, actors: ActorRanks, cp: int = 1) -> None:
        """cp: the ranks that share each sample."""
        self._actors = actors
        self._cp = cp
        self._version = 0

    @property
    def dp_size(self) -> int:
        """The number of micro-batches in a round: ranks, or groups of ranks that share samples."""
        groups, rest = divmod(self._actors.size, self._cp)
        assert rest == 0, (self._actors.size, self._cp)
        return groups

    async def begin_save(self, path: str, *, in_background: bool) -> None:
        """Begin to save the current state; training may continue when this returns, with `in_background` long before
        all is written.
        """
        await self._actors.call_all("begin_save" if in_background else "save", path)

    async def saved(self) -> tuple[StoredFile, ...]:
        """Wait until the save is on the disk. Returns all its files; raises the error of a failed write."""
        poll_s = FIRST_POLL_S
        while True:
            files_by_rank = cast(list[tuple[StoredFile, ...] | None], await self._actors.call_all("saved"))
            if None not in files_by_rank:
                return tuple(file for files in files_by_rank if files is not None for file in files)
            await asyncio.sleep(poll_s)
            poll_s = min(2 * poll_s, LAST_POLL_S)

    async def load(self, path: str) -> int:
        """Load a saved state of any number of ranks; returns its version."""
        versions = cast(list[int], await self._actors.call_all("load", path))
        assert len(set(versions)) == 1, "all ranks read the same checkpoint"
        self._version = versions[0]
        return self._version

    async def export(self, path: str) -> None:
        await self._actors.call_all("export", path)

    async def _call_each(self, method: str, each: Sequence[tuple[object, ...]]) -> list[object]:
        """Call ranks with the arguments of each micro-batch. Returns an answer for each."""
        answers = await self._actors.call_each(method, [args for args in each for _ in range(self._cp)])
        return answers[:: self._cp]


OF_RANK = "rank/"  # begins the names of metrics that differ between ranks
FLOPS, PEAK_FLOPS = f"{OF_RANK}model_flops", f"{OF_RANK}peak_flops_per_s"


def over_ranks(answers: Sequence[Metrics]) -> Metrics:
    """The metrics of rank 0 that all ranks share, and those of each rank as sums, or as maximum and mean."""
    metrics = {name: value for name, value in answers[0].items() if not name.startswith(OF_RANK)}
    for name in answers[0].keys() - metrics.keys():
        values = [answer[name] for answer in answers if name in answer]
        if len(values) < len(answers):  # a GPU of another kind: a sum or a mean over the rest would be wrong
            continue
        shown = name.removeprefix(OF_RANK)
        if name in (FLOPS, PEAK_FLOPS):
            metrics[f"perf/{shown}"] = sum(values)
        else:
            metrics |= {f"perf/{shown}": max(values), f"perf/{shown}_mean": sum(values) / len(values)}
    return metrics
