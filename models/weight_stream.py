"""A model, sharded or not, as a stream of unsharded tensors in buckets. Never keeps them, never sends them anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class UnshardedBucket:
    """A bucket on its way out: which tensors it holds is known, they themselves are unsharded as they are asked for.

    On several ranks they come in the type that travels; on one rank they may be the parameters themselves, in their
    own type: whoever keeps one copies and casts it.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tensors: Iterator[Tensor]

    def drain(self) -> None:
        """Take part in what is left of the collective, and keep nothing."""
        for _ in self.tensors:
            pass


class WeightStream:
    """Buckets of about `bucket_bytes` of tensors under Hugging Face names, in the order of the model.

    A tied head is left out: it is the embedding, which the receiver ties as well.
    """

    def __init__(self, model: nn.Module, dtype: str, bucket_bytes: int) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._buckets = list(_plan(list(_tensors(model)), self._dtype.itemsize, bucket_bytes))

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def unsharded(self, index: int) -> UnshardedBucket:
        """One bucket, a whole tensor at a time. A collective: every rank takes all its tensors, or drains it."""
        bucket = self._buckets[index]
        return UnshardedBucket(
            names=tuple(name for name, _ in bucket),
            shapes=tuple(tuple(tensor.shape) for _, tensor in bucket),
            tensors=(_unshard(tensor, self._dtype) for _, tensor in bucket),
        )


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
    held = tensor.detach()
    if not isinstance(held, DTensor):
        return held
    if held.device_mesh.size() == 1:
        return held.to_local()
    cast = held.to(dtype)  # before gathering: half the traffic for bf16
    assert isinstance(cast, DTensor)
    return cast.full_tensor()
