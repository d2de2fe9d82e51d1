"""Ways for a bucket's bytes to leave the learner. Knows neither their model nor the engines that take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from models.checksums import as_bytes, tensor_checksums
from models.types import GroupLink, InlineBytes, Payload, WeightBucket, WeightTensor
from models.weight_stream import UnshardedBucket


class WeightTransport(Protocol):
    """Rank 0's end. What it posted can be read until the next but one is posted: at most two buckets are alive."""

    def connect(self, link: GroupLink | None) -> None:
        """Join the group of the receivers, or leave it. Nothing, but for broadcasts."""
        ...

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        """Take all tensors of a bucket, cast them, say where they are."""
        ...

    def deliver(self, index: int) -> None:
        """Send what was posted, while the receivers load it. Nothing, but for broadcasts."""
        ...

    def close(self) -> None: ...


class ObjectStore:
    """The bytes travel within the bucket. Each post has memory of its own, so that a bucket outlives any step."""

    def __init__(self, dtype: str, folder: str = "") -> None:
        self._dtype = dtype

    def connect(self, link: GroupLink | None) -> None: ...

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        dtype = getattr(torch, self._dtype)
        held = [tensor.to("cpu", dtype, copy=True) for tensor in bucket.tensors]
        return announced(bucket, held, self._dtype, InlineBytes(data=tuple(as_bytes(tensor) for tensor in held)))

    def deliver(self, index: int) -> None: ...

    def close(self) -> None: ...


def announced(bucket: UnshardedBucket, sent: Sequence[Tensor], dtype: str, payload: Payload) -> WeightBucket:
    """The bucket as receivers hear of it; `sent` are its tensors as they travel."""
    tensors = (
        WeightTensor(name=name, dtype=dtype, shape=shape, checksum=checksum)
        for name, shape, checksum in zip(bucket.names, bucket.shapes, tensor_checksums(sent), strict=True)
    )
    return WeightBucket(tensors=tuple(tensors), payload=payload)


# (dtype, folder) -> rank 0's end. A new way is a class and a row here, a payload in types.py, a case in `received`.
TRANSPORTS: dict[str, Callable[[str, str], WeightTransport]] = {
    "object_store": ObjectStore,
}
