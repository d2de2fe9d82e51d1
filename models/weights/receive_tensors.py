"""A bucket's bytes as torch tensors in an engine, over any transport.

    group = BroadcastGroup(device, local_rank)      # one per process
    group.join(link)                                # begin_weights; link None: no broadcasts
    with received(bucket, group) as tensors:        # load_bucket
        checksums |= checksums_of(tensors)
        load(tensors)

Engines' workers import this: torch, numpy, safetensors and msgspec are all it needs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from grmpipe.models.types import WeightBucket, WeightTensor
from grmpipe.models.weights.checksums import tensor_checksums
from grmpipe.models.weights.open_bucket import open_bucket, parse_dtype
from grmpipe.models.weights.process_group import BroadcastLink
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
