"""Received weight buckets into a model, in place, by Hugging Face name. Never sends, never casts on the way in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.types import WeightBucket, WeightTensor
from models.weight_stream import checksums


class WeightInbox:
    """Loads buckets and remembers, until they are collected, the checksums of what came."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._checksums: dict[str, str] = {}

    def load(self, bucket: WeightBucket) -> None:
        """All of a bucket or, with a ValueError that names the tensor, nothing. A tied weight has both its names."""
        received = checksums(bucket)
        held = self._model.state_dict()
        pairs = [(_held_tensor(held, tensor), _as_torch(tensor)) for tensor in bucket.tensors]
        for target, source in pairs:
            target.copy_(source)
        self._checksums |= received

    def collect_checksums(self) -> dict[str, str]:
        """Of all tensors since the last call."""
        collected, self._checksums = self._checksums, {}
        return collected


def _held_tensor(held: dict[str, Tensor], tensor: WeightTensor) -> Tensor:
    target = held.get(tensor.name)
    if target is None:
        raise ValueError(f"weights: the engine's model has no tensor {tensor.name!r}; is it the same architecture?")
    if tuple(target.shape) != tensor.shape:
        raise ValueError(f"weights: {tensor.name!r} came as {tensor.shape}, the engine holds {tuple(target.shape)}")
    return target


def _as_torch(tensor: WeightTensor) -> Tensor:
    dtype = getattr(torch, tensor.dtype)
    num_bytes = dtype.itemsize * torch.Size(tensor.shape).numel()
    if tensor.data.nbytes != num_bytes:
        raise ValueError(f"weights: {tensor.name!r} came with {tensor.data.nbytes} bytes instead of {num_bytes}")
    # torch wants memory that may be written; what lies in a shared store may not.
    data = tensor.data if tensor.data.flags.writeable else tensor.data.copy()
    return torch.from_numpy(data).view(dtype).view(tensor.shape)
