"""A bucket's bytes as torch tensors in an engine, over any transport; and an engine's model that they are loaded into.

    group = BroadcastLink(device)                   # one per process
    group.join(link)                                # begin_weights; link None: no broadcasts
    with receive_tensors(bucket, group) as tensors:        # load_bucket
        checksums |= compute_checksums(tensors)
        load(tensors)

Engines' workers import this: torch, numpy, safetensors and msgspec are all it needs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from grmpipe.models.types import GroupLink, WeightBucket, WeightTensor
from grmpipe.models.weights.checksums import tensor_checksums
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.transport_ends import open_bucket, parse_dtype
from grmpipe.models.weights.transports import TRANSPORTS, import_transport

for kind in TRANSPORTS.values():
    import_transport(kind.sender)  # importing its file registers the receiving end

Received = list[tuple[WeightTensor, Tensor]]


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
        self._held: dict[str, Tensor] = {}  # the model's tensors, from the first bucket to the last

    def begin(self, link: GroupLink | None) -> None:
        """Begin a push: drop an unfinished one. Join its group, leave an older one."""
        self._checksums, self._held = {}, {}
        self._group.join(link)

    def load(self, bucket: WeightBucket) -> None:
        """Load all of a bucket, or nothing with a ValueError that names the tensor. A tied weight has both its
        names.
        """
        try:
            self._held = self._held or self._model.state_dict()  # milliseconds each time
            targets = [_held_tensor(self._held, tensor, self._own_name(tensor.name)) for tensor in bucket.tensors]
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
        collected, self._checksums, self._held = self._checksums, {}, {}
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
