"""The tensors of a trained model, one by one and whole: gathered from all ranks if it is sharded. Sends nothing."""

from __future__ import annotations

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
class Outgoing:
    """The tensors of a push. An engine needs fixed ones only once."""

    changing: Sequence[Piece]
    fixed: Sequence[Piece] = ()


def pieces_of(model: nn.Module, dtype: str) -> Iterator[Piece]:
    """All tensors of a model, unchanged."""
    for name, tensor in _tensors(model):
        yield Piece(name=name, tensor=tensor, unsharded=partial(unshard, tensor, getattr(torch, dtype)))


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
