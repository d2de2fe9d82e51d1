"""Untrained weights as the source of a push: each engine reads the model's files on its machine.

The page cache holds files that were read before, as long as there is memory. Knows no tensors.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from grmpipe.models.types import GroupLink, ModelFiles, WeightBucket
from grmpipe.scheduler.weights.weight_push import SyncConfig


def files_at(path: str) -> WeightBucket:
    return WeightBucket(tensors=(), payload=ModelFiles(path=path))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """A WeightSource whose weights never change.

    path:     the model's folder, on the machine of every engine.
    logprobs: one per token of `probe_ids`, from an engine started from these files; empty: unknown.
    """

    path: str
    probe_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    config: SyncConfig

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        yield 0

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        assert tuple(token_ids) == self.probe_ids, "these log-probs are unknown"
        return self.logprobs

    async def connect(self, link: GroupLink | None) -> None:
        assert link is None, "files are read, not broadcast"

    async def num_buckets(self) -> int:
        return 1

    async def num_fixed_buckets(self) -> int:
        return 0

    async def bucket(self, index: int) -> WeightBucket:
        return files_at(self.path)
