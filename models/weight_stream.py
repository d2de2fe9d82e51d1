"""A model, sharded or not, as a stream of weight buckets under Hugging Face names. Never sends them anywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.types import WeightBucket, WeightTensor


class WeightStream:
    """Buckets of about `bucket_bytes`, in the order of the model. Only one is unsharded at a time.

    A tied head is left out: it is the embedding, which the receiver ties as well.
    """

    def __init__(self, model: nn.Module, dtype: str, bucket_bytes: int) -> None:
        self._dtype = dtype
        self._buckets = list(_plan(list(_tensors(model)), getattr(torch, dtype).itemsize, bucket_bytes))

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def bucket(self, index: int, keep: bool = True) -> WeightBucket | None:
        """Unshard one bucket. A collective: all ranks call it with the same index; those that don't keep get None."""
        tensors = []
        for name, tensor in self._buckets[index]:
            full = _unshard(tensor, getattr(torch, self._dtype))
            if keep:
                tensors.append(_to_bytes(name, full, self._dtype))
        return WeightBucket(tensors=tuple(tensors)) if keep else None


def checksum(data: np.ndarray | bytes) -> str:
    """blake2b with 64 bits, in hex, of bytes or a numpy array."""
    return hashlib.blake2b(data.data if isinstance(data, np.ndarray) else data, digest_size=8).hexdigest()


def checksums(bucket: WeightBucket) -> dict[str, str]:
    """Name -> checksum of the unsharded bytes, as they travel."""
    return {tensor.name: checksum(tensor.data) for tensor in bucket.tensors}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (each once, however often it is tied) and what else a checkpoint of the model holds."""
    yield from model.named_parameters()
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _plan(tensors: list[tuple[str, Tensor]], itemsize: int, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Fill a bucket until the next tensor doesn't fit. A larger tensor gets a bucket of its own."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * itemsize
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += size
    if bucket:
        yield bucket


@torch.no_grad()
def _unshard(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast before gathering: half the traffic for bf16."""
    cast = tensor.detach().to(dtype)
    return cast.full_tensor() if isinstance(cast, DTensor) else cast


def _to_bytes(name: str, tensor: Tensor, dtype: str) -> WeightTensor:
    # copy: on one rank the unsharded tensor is the parameter itself, which the next step changes.
    data = tensor.to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy()
    return WeightTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), data=data)
