"""The tensors of a trained model, one by one or in parts, and whole: gathered from all ranks if it is sharded."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of a push: its name, its shape, and how to make it whole (a collective)."""

    name: str
    tensor: Tensor
    unsharded: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some entries of a tensor along its first dimension, such as experts: their numbers, and how to make them whole (a
    collective).
    """

    numbers: tuple[int, ...]
    unsharded: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """The tensors of a push. An engine needs fixed ones only once."""

    changing: Sequence[Piece]
    fixed: Sequence[Piece] = ()


def list_pieces(model: nn.Module, dtype: str) -> Iterator[Piece]:
    """All tensors of a model, unchanged."""
    for name, tensor in _tensors(model):
        yield Piece(name=name, tensor=tensor, unsharded=partial(unshard, tensor, getattr(torch, dtype)))


def split_rows(tensor: Tensor, dtype: str, at_a_time: int) -> Iterator[Rows]:
    """A tensor in parts of about `at_a_time` entries, so that no rank holds it whole. Each shard of the first dimension
    adds as many entries to a part, at least one: their numbers have gaps.
    """
    parts = _num_first_shards(tensor)
    each = len(tensor) // parts  # entries of one rank
    step = max(1, at_a_time // parts)
    for first in range(0, each, step):
        last = min(each, first + step)
        numbers = tuple(part * each + place for part in range(parts) for place in range(first, last))
        yield Rows(numbers=numbers, unsharded=partial(_unshard_rows, tensor, getattr(torch, dtype), first, last))


def has_even_rows(tensor: Tensor) -> bool:
    """Whether every rank has as many entries of the first dimension, if ranks shard it."""
    return len(tensor) % _num_first_shards(tensor) == 0


def _num_first_shards(tensor: Tensor) -> int:
    """The number of shards along the first dimension."""
    if not isinstance(tensor, DTensor):
        return 1
    sharded = (placement.is_shard(0) for placement in tensor.placements)
    return math.prod(size for size, divides in zip(tensor.device_mesh.shape, sharded, strict=True) if divides)


@torch.no_grad()
def _unshard_rows(tensor: Tensor, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """Entries first:last of each rank's shard, whole."""
    held = tensor.detach()
    if not isinstance(held, DTensor):
        return held[first:last]
    part = held.to_local()[first:last]
    if held.device_mesh.size() == 1:
        return part
    return DTensor.from_local(part.to(dtype), held.device_mesh, held.placements, run_check=False).full_tensor()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (each once, even if tied) and the other tensors in a checkpoint of the model."""
    yield from model.named_parameters()
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


@torch.no_grad()
def unshard(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor. A collective. Already in `dtype` with several ranks."""
    held = tensor.detach()
    if not isinstance(held, DTensor):
        return held
    if held.device_mesh.size() == 1:
        return held.to_local()
    cast = held.to(dtype)  # before gathering: half the traffic for bf16
    assert isinstance(cast, DTensor)
    return cast.full_tensor()
