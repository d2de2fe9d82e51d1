"""Untrained weights as the source of a push: each engine reads the model's files on its machine.

The page cache holds files that were read before, as long as there is memory. Knows no tensors.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from grmpipe.models.types import Engine, GroupLink, ModelFiles, WeightBucket
from grmpipe.scheduler.weights.weight_push import Push, SyncConfig, SyncReport

VERSION = 0  # of untrained weights


async def load_files(engine: Engine, path: str) -> None:
    """Give an engine without requests the weights of a model's folder on its machine."""
    await engine.begin_weights(None)
    await engine.load_bucket(files_at(path))
    await engine.commit_weights(VERSION)


def files_at(path: str) -> WeightBucket:
    return WeightBucket(tensors=(), payload=ModelFiles(path=path))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """A WeightSource whose weights never change.

    path:     the model's folder, on the machine of every engine.
    logprobs: of the tokens `probe_ids`, from an engine started from these files; empty: unknown.
    """

    path: str
    probe_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    config: SyncConfig

    async def bring_current(self, name: str, engine: Engine, admit: Callable[[], None]) -> SyncReport:
        """Send the weights to a new engine before its first request. Raises like `WeightSync.push`."""
        push = Push(self, {name: engine}, VERSION, self.probe_ids, self.config, frozenset())
        async with push.deadline():
            report = await push.run(None, 1, "files")
        admit()
        return report

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

    async def deliver(self, index: int) -> None:
        raise AssertionError("files are read, not broadcast")
