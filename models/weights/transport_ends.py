"""The two ends of a weight transport: the sending one, as the learner sees it, and the function that turns a bucket's
payload into tensors. Each transport's file has a subclass of the first, and registers its own of the second.

@open_bucket.register
def _(payload: Pigeon, tensors: Sequence[WeightTensor], group: BroadcastLink | None) -> Sequence[Tensor]: ...
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor, nn

from grmpipe.models.bucket_memory import count_bytes
from grmpipe.models.types import GroupLink, ModelFiles, Payload, WeightBucket, WeightTensor
from grmpipe.models.weights.checksums import tensor_checksums
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.transports import TRANSPORTS, import_transport, transport_kind

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


for kind in TRANSPORTS.values():
    import_transport(kind.sender)  # importing its file registers the receiving end

Received = list[tuple[WeightTensor, Tensor]]


# -- an engine's end: a bucket's bytes as tensors, and the model that they are loaded into -----------------------------
#     group = BroadcastLink(device)                          # one per process
#     group.join(link)                                       # begin_weights; link None: no broadcasts
#     with receive_tensors(bucket, group) as tensors:        # load_bucket
#         checksums |= compute_checksums(tensors)
#         load(tensors)
# Engines' workers import this: torch, numpy, safetensors and msgspec are all it needs.


@contextmanager
def receive_tensors(bucket: WeightBucket, group: BroadcastLink | None = None) -> Iterator[Received]:
    """The tensors of a bucket, in order, in the announced type and shape: valid only within the block.

    On the CPU, or on their device. Raises ValueError that names a tensor that differs from its announcement,
    ConnectionError if a broadcast broke off.
    """
    tensors = [
        _checked(announced, tensor)
        for announced, tensor in zip(bucket.tensors, open_bucket(bucket.payload, bucket.tensors, group), strict=True)
    ]
    try:
        yield tensors
    finally:
        tensors.clear()  # mapped memory is released with its last tensor


def compute_checksums(tensors: Received) -> dict[str, str]:
    """Name -> checksum of the received tensors."""
    sums = tensor_checksums([tensor for _, tensor in tensors])
    return {announced.name: checksum for (announced, _), checksum in zip(tensors, sums, strict=True)}


def _checked(announced: WeightTensor, tensor: Tensor) -> tuple[WeightTensor, Tensor]:
    if tensor.dtype != parse_dtype(announced) or tuple(tensor.shape) != announced.shape:
        raise ValueError(
            f"weights: {announced.name!r} was announced as {announced.dtype} {announced.shape}, "
            f"but arrived as {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        )
    return announced, tensor


class WeightInbox:
    """Loads buckets, and keeps the checksums of the model's resulting weights until they are collected.

    own_name: the name of a sent tensor in the model, if it differs.
    """

    def __init__(self, model: nn.Module, device: torch.device, own_name: Callable[[str], str] | None = None) -> None:
        self._model, self._own_name = model, own_name or str
        self._group = BroadcastLink(device)
        self._checksums: dict[str, str] = {}

    def begin(self, link: GroupLink | None) -> None:
        """Begin a push: drop an unfinished one. Join its group, leave an older one."""
        self._checksums = {}
        self._group.join(link)

    def load(self, bucket: WeightBucket) -> None:
        """Load all of a bucket, or nothing with a ValueError that names the tensor. A tied weight has both its
        names.
        """
        try:
            held = self._model.state_dict()
            targets = [_held_tensor(held, tensor, self._own_name(tensor.name)) for tensor in bucket.tensors]
            with receive_tensors(bucket, self._group) as tensors:
                applied = [
                    (announced, _applied(target, source))
                    for target, (announced, source) in zip(targets, tensors, strict=True)
                ]
                checksums = compute_checksums(applied)
        except BaseException:
            self._group.leave()  # otherwise the sender waits for us until its timeout
            raise
        self._checksums |= checksums

    def collect_checksums(self) -> dict[str, str]:
        """The checksums of all tensors since the push began."""
        collected, self._checksums = self._checksums, {}
        return collected

    def close(self) -> None:
        self._group.leave()


def _applied(target: Tensor, source: Tensor) -> Tensor:
    """The model's tensor, in the type and on the device of its source: its bytes must be the source's.

    If the model's type or device can't give the bytes back, they are compared here and the source is returned.
    """
    target.copy_(source)
    if target.device == source.device and torch.promote_types(source.dtype, target.dtype) == target.dtype:
        return target.to(source.dtype)
    if torch.equal(target, source.to(target.device, target.dtype)):
        return source
    return target.to(source.device, source.dtype)


def _held_tensor(held: dict[str, Tensor], tensor: WeightTensor, own_name: str) -> Tensor:
    target = held.get(own_name)
    if target is None:
        raise ValueError(f"weights: the engine's model has no tensor {tensor.name!r}; is it the same architecture?")
    if tuple(target.shape) != tensor.shape:
        raise ValueError(f"weights: {tensor.name!r} arrived as {tensor.shape}, the engine has {tuple(target.shape)}")
    return target
