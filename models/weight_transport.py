"""Ways for a bucket's bytes to reach an engine: every payload as torch tensors. Neither sends nor loads them.

Engines' workers import this: torch, numpy and safetensors are all it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from models.checksums import tensor_checksums
from models.types import InlineBytes, WeightBucket, WeightTensor

Received = list[tuple[WeightTensor, Tensor]]


@contextmanager
def received(bucket: WeightBucket) -> Iterator[Received]:
    """The tensors of a bucket, in order, in the announced type and shape: to be read within the block only.

    Raises ValueError naming a tensor that isn't what was announced.
    """
    payload = bucket.payload
    if isinstance(payload, InlineBytes):
        yield _inline(bucket.tensors, payload)
    else:
        raise ValueError(f"sync.transport: this engine can't take weights by {type(payload).__name__}")


def checksums_of(tensors: Received) -> dict[str, str]:
    """Name -> blake2b-64 hex of what really came; empty for what is on a device."""
    sums = tensor_checksums([tensor for _, tensor in tensors])
    return {announced.name: checksum for (announced, _), checksum in zip(tensors, sums, strict=True)}


def num_bytes(tensor: WeightTensor) -> int:
    """Of one tensor, unsharded, as it travels."""
    return int(getattr(torch, tensor.dtype).itemsize * torch.Size(tensor.shape).numel())


def _inline(tensors: Sequence[WeightTensor], payload: InlineBytes) -> Received:
    came: Received = []
    for tensor, data in zip(tensors, payload.data, strict=True):
        if data.nbytes != num_bytes(tensor):
            raise ValueError(f"weights: {tensor.name!r} came with {data.nbytes} bytes instead of {num_bytes(tensor)}")
        # torch wants memory that may be written; what lies in a shared store may not.
        writable = data if data.flags.writeable else data.copy()
        dtype = getattr(torch, tensor.dtype)
        came.append((tensor, torch.from_numpy(writable).view(dtype).view(tensor.shape)))
    return came
