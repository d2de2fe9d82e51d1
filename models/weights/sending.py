"""The sending end of a weight transport, as the learner sees it. Knows neither the model nor the engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.types import GroupLink, Payload, WeightBucket, WeightTensor
from models.weights.checksums import tensor_checksums
from models.weights.transports import named, transport_kind

CPU = torch.device("cpu")
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnshardedBucket:
    """A bucket on its way out: which tensors it holds is known, they themselves are unsharded as they are asked for.

    On several ranks they come in the type that travels; on one rank they may be the parameters themselves, in their
    own type: whoever keeps one copies and casts it.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    tensors: Iterator[Tensor]

    def drain(self) -> None:
        """Take part in what is left of the collective, and keep nothing."""
        for _ in self.tensors:
            pass


class WeightTransport(ABC):
    """A sending rank's end. Two buckets are alive at most: the last one posted, and the one before it, still loaded."""

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        """dtype: as tensors travel. device: where the learner's weights are. folder: for those that need one."""
        self._dtype = dtype
        self._device = device
        self._folder = folder

    @abstractmethod
    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        """Take all tensors of a bucket, cast them, say where they are."""

    # What only broadcasts need.
    def connect(self, link: GroupLink | None) -> None:  # noqa: B027
        """Join the group of the receivers as its sender; leave an older one, or (None) any."""

    def deliver(self, index: int) -> None:  # noqa: B027
        """Send what was posted, while the receivers load it."""

    def close(self) -> None:  # noqa: B027
        """Give back memory and files, groups too."""

    def _fill(self, targets: Sequence[Tensor], bucket: UnshardedBucket) -> None:
        """Cast and copy in one go, straight from the parameters where they are whole."""
        for target, tensor in zip(targets, bucket.tensors, strict=True):
            target.copy_(tensor)

    def _announce(self, bucket: UnshardedBucket, sent: Sequence[Tensor], payload: Payload) -> WeightBucket:
        """The bucket as receivers hear of it; `sent` are its tensors as they travel."""
        tensors = (
            WeightTensor(name=name, dtype=self._dtype, shape=shape, checksum=checksum)
            for name, shape, checksum in zip(bucket.names, bucket.shapes, tensor_checksums(sent), strict=True)
        )
        return WeightBucket(tensors=tuple(tensors), payload=payload)

    def _dtypes(self, bucket: UnshardedBucket) -> list[torch.dtype]:
        return [getattr(torch, self._dtype)] * len(bucket.names)


def open_transport(name: str, dtype: str, device: torch.device = CPU, folder: str = "") -> WeightTransport:
    """The sending end of `sync.transport`. Raises ValueError in that key's words."""
    kind = transport_kind(name)
    sender = named(kind.sender)
    if not (isinstance(sender, type) and issubclass(sender, WeightTransport)):
        raise ValueError(f"sync.transport: {kind.sender} is no WeightTransport")
    return sender(dtype, device, folder)
