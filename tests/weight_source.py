"""A learner that only counts its steps, and the spans of a timeline, for tests of slots on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from grmpipe.models.types import GroupLink, InlineBytes, WeightBucket, WeightTensor
from grmpipe.models.weights.checksums import checksum as checksum_of


class CountingLearner:
    """A learner whose weights are its number of steps: one bucket for each of these tensors, which takes `bucket_s`."""

    def __init__(self, *tensors: str, step_s: float = 0.0, bucket_s: float = 0.0) -> None:
        self.steps, self._tensors, self._step_s, self._bucket_s = 0, tensors, step_s, bucket_s
        self._hold = asyncio.Lock()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        async with self._hold:
            yield self.steps

    async def step(self, seconds: float | None = None) -> None:
        async with self._hold:
            await asyncio.sleep(self._step_s if seconds is None else seconds)
            self.steps += 1

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return (-1.0,) * (len(token_ids) - 1)

    async def connect(self, link: GroupLink | None) -> None:
        return None

    async def num_buckets(self) -> int:
        return len(self._tensors)

    async def num_fixed_buckets(self) -> int:
        return 0

    async def bucket(self, index: int) -> WeightBucket:
        await asyncio.sleep(self._bucket_s)
        data = np.full(8, self.steps % 256, dtype=np.uint8)
        tensor = WeightTensor(name=self._tensors[index], dtype="float32", shape=(2,), checksum=checksum_of(data))
        return WeightBucket(tensors=(tensor,), payload=InlineBytes(data=(data,)))


@dataclass
class Spans:
    seen: list[tuple[str, str]] = field(default_factory=list)

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None:
        assert end_s >= start_s
        self.seen.append((lane, name))
