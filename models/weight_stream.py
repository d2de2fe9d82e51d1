"""A model, sharded or not, as a stream of unsharded tensors in buckets. Never keeps them, never sends them anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of a push: its name there, what has its shape, and how it becomes whole (a collective)."""

    name: str
    tensor: Tensor
    unsharded: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """What a push sends. An engine needs what is fixed once."""

    changing: Sequence[Piece]
    fixed: Sequence[Piece] = ()


class WeightStream:
    """Buckets of about `bucket_bytes` of tensors under Hugging Face names, in the order of the model; those of fixed
    tensors first.

    A tied head is left out: it is the embedding, which the receiver ties as well.
    """

    def __init__(self, model: nn.Module, dtype: str, bucket_bytes: int, outgoing: Outgoing | None = None) -> None:
        """`outgoing`: where that isn't the model, whole and as it stands."""
        sent = outgoing or Outgoing(changing=list(pieces_of(model, dtype)))
        itemsize = getattr(torch, dtype).itemsize
        fixed, changing = (list(_plan(pieces, itemsize, bucket_bytes)) for pieces in (sent.fixed, sent.changing))
        self.num_fixed_buckets = len(fixed)
        self._buckets = [*fixed, *changing]

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def unsharded(self, index: int) -> UnshardedBucket:
        """One bucket, a whole tensor at a time. A collective: every rank takes all its tensors, or drains it."""
        bucket = self._buckets[index]
        return UnshardedBucket(
            names=tuple(piece.name for piece in bucket),
            shapes=tuple(tuple(piece.tensor.shape) for piece in bucket),
            tensors=(piece.unsharded() for piece in bucket),
        )


def pieces_of(model: nn.Module, dtype: str) -> Iterator[Piece]:
    """All of a model, as it stands."""
    for name, tensor in _tensors(model):
        yield Piece(name=name, tensor=tensor, unsharded=partial(unshard, tensor, getattr(torch, dtype)))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (each once, however often it is tied) and what else a checkpoint of the model holds."""
    yield from model.named_parameters()
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def _plan(pieces: Sequence[Piece], itemsize: int, bucket_bytes: int) -> Iterator[list[Piece]]:
    """Fill a bucket until the next tensor doesn't fit. A larger tensor gets a bucket of its own."""
    bucket: list[Piece] = []
    filled = 0
    for piece in pieces:
        size = piece.tensor.numel() * itemsize
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(piece)
        filled += size
    if bucket:
        yield bucket


@torch.no_grad()
def unshard(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A collective. Already in `dtype` where there are several ranks."""
    held = tensor.detach()
    if not isinstance(held, DTensor):
        return held
    if held.device_mesh.size() == 1:
        return held.to_local()
    cast = held.to(dtype)  # before gathering: half the traffic for bf16
    assert isinstance(cast, DTensor)
    return cast.full_tensor()
