"""The two ends of a weight transport: the sending one, as the learner sees it, and the function that turns a bucket's
payload into tensors. Each transport's file has a subclass of the first, and registers its own of the second.

@open_bucket.register
def _(payload: Pigeon, tensors: Sequence[WeightTensor], group: BroadcastLink | None) -> Sequence[Tensor]: ...
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from grmpipe.models.bucket_memory import count_bytes
from grmpipe.models.types import GroupLink, ModelFiles, Payload, WeightBucket, WeightTensor
from grmpipe.models.weights.checksums import tensor_checksums
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.transports import import_transport, transport_kind

CPU = torch.device("cpu")
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnshardedBucket:
    """A bucket to send: its list of tensors is known, the tensors are unsharded when they are read.

    With several ranks they come in the type that is sent; on one rank they may be the parameters themselves, in their
    own type: copy and cast a tensor to keep it.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    tensors: Iterator[Tensor]

    def drain(self) -> None:
        """Take part in the rest of the collective, and keep nothing."""
        for _ in self.tensors:
            pass


class WeightTransport(ABC):
    """The sending end of one rank. At most two buckets are alive: the last one posted, and the one before it, still
    being loaded.
    """

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        """dtype: the one in which tensors are sent. device: the learner's. folder: for transports that need one."""
        self._dtype = dtype
        self._device = device
        self._folder = folder

    @abstractmethod
    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        """Take all tensors of a bucket, cast them, and say where they are."""

    # Needed only by broadcasts.
    def connect(self, link: GroupLink | None) -> None:  # noqa: B027
        """Join the group of the receivers as its sender; leave an older one, or with None any."""

    def deliver(self, index: int) -> None:  # noqa: B027
        """Send a posted bucket while the receivers load it. Another thread may post the next one meanwhile."""

    def publish(self, checksums: Mapping[str, str], version: int) -> None:  # noqa: B027
        """Tell whoever asks for the checksums of a version, after its last bucket."""

    def close(self) -> None:  # noqa: B027
        """Free memory, files and groups."""

    def _fill(self, targets: Sequence[Tensor], bucket: UnshardedBucket) -> None:
        """Cast and copy in one step, directly from the parameters if they are whole."""
        for target, tensor in zip(targets, bucket.tensors, strict=True):
            target.copy_(tensor)

    def _announce(self, bucket: UnshardedBucket, sent: Sequence[Tensor], payload: Payload) -> WeightBucket:
        """The bucket as sent to receivers; `sent`: its tensors as sent."""
        tensors = (
            WeightTensor(name=name, dtype=self._dtype, shape=shape, checksum=checksum)
            for name, shape, checksum in zip(bucket.names, bucket.shapes, tensor_checksums(sent), strict=True)
        )
        return WeightBucket(tensors=tuple(tensors), payload=payload)

    def _dtypes(self, bucket: UnshardedBucket) -> list[torch.dtype]:
        return [getattr(torch, self._dtype)] * len(bucket.names)


def open_transport(name: str, dtype: str, device: torch.device = CPU, folder: str = "") -> WeightTransport:
    """The sending end of `sync.transport`. Raises ValueError that names this key."""
    kind = transport_kind(name)
    sender = import_transport(kind.sender)
    if not (isinstance(sender, type) and issubclass(sender, WeightTransport)):
        raise ValueError(f"sync.transport: {kind.sender} is no WeightTransport")
    return sender(dtype, device, folder)


@singledispatch
def open_bucket(
    payload: Payload, tensors: Sequence[WeightTensor], group: BroadcastLink | None = None
) -> Sequence[Tensor]:
    """The tensors of a bucket, in order, on the CPU or their device. Read them before the sender makes its second next
    bucket.

    Raises ValueError that names a tensor that can't be read, ConnectionError if a broadcast broke off.
    """
    raise ValueError(f"weights: no transport here takes {type(payload).__name__}")


@open_bucket.register
def _(payload: ModelFiles, tensors: Sequence[WeightTensor], group: BroadcastLink | None = None) -> Sequence[Tensor]:
    raise ValueError(f"weights: {payload.path} is for engines that read model files themselves")


def num_bytes(tensor: WeightTensor) -> int:
    """The bytes of one tensor, unsharded, as sent."""
    return count_bytes(parse_dtype(tensor), tensor.shape)


def parse_dtype(tensor: WeightTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype
