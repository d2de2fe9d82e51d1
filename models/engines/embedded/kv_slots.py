"""The cache of a running batch (keys, values, experts): one slot per row, grown by doubling."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
import torch
from torch import Tensor

from grmpipe.models.lm.moe.expert_routing import RoutingShape


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The cache entry of one token: `num_layers` times a key and a value for each of `num_kv_heads`.

    routing: of a mixture whose experts are recorded, next to keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    routing: RoutingShape | None = None


class KvSlots:
    """The cache as one tensor [N, R, T, 2, G, D]. N: layers, R: rows, T: token positions, 2: key and value, G: KV
    heads, D: head.

    Attention reads the first rows in place, so the running rows must stay compact: `copy` moves them.
    """

    def __init__(self, shape: KvShape, max_rows: int, max_tokens: int) -> None:
        self.shape = shape
        self.max_rows, self._max_tokens = max_rows, max_tokens
        self.kv_NRT2GD = self._allocate(0, 0)
        self.experts_RTLK = self._allocate_experts(0, 0)

    @property
    def tokens_per_row(self) -> int:
        return self.kv_NRT2GD.shape[2]

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make memory for this many rows of this many tokens. Cached values stay; earlier views become invalid."""
        assert num_rows <= self.max_rows and num_tokens <= self._max_tokens
        rows, tokens = self.kv_NRT2GD.shape[1:3]
        if num_rows <= rows and num_tokens <= tokens:
            return
        grown = self._allocate(_grow(rows, num_rows, self.max_rows), _grow(tokens, num_tokens, self._max_tokens))
        grown[:, :rows, :tokens] = self.kv_NRT2GD
        self.kv_NRT2GD = grown
        more = self._allocate_experts(*grown.shape[1:3])
        if more is not None and self.experts_RTLK is not None:
            more[:rows, :tokens] = self.experts_RTLK
        self.experts_RTLK = more

    def give_up(self) -> int:
        """Free the cache; returns the bytes freed. Rows grow again."""
        num_bytes = self.kv_NRT2GD.untyped_storage().nbytes()
        self.kv_NRT2GD = self._allocate(0, 0)
        self.experts_RTLK = self._allocate_experts(0, 0)
        return num_bytes

    def copy(self, sources: Sequence[int], targets: Sequence[int], num_tokens: int) -> None:
        """Copy the first tokens of the source rows to the target rows. A row may be copied to many."""
        kv = self.kv_NRT2GD
        kv[:, list(targets), :num_tokens] = kv[:, list(sources), :num_tokens]
        if self.experts_RTLK is not None:
            self.experts_RTLK[list(targets), :num_tokens] = self.experts_RTLK[list(sources), :num_tokens]

    def write(self, layer: int, places_P: Tensor, keys_and_values_PC: Tensor) -> None:
        """Write one key and value (C = 2 G D) per place, which is row * tokens_per_row + position."""
        self.kv_NRT2GD[layer].flatten(0, 1).flatten(1).index_copy_(0, places_P, keys_and_values_PC)

    def read(self, layer: int, rows: slice | Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, G, num_tokens, D]: views for a slice, copies for an index."""
        kv_RT2GD = self.kv_NRT2GD[layer, rows, :num_tokens]
        return kv_RT2GD[:, :, 0].transpose(1, 2), kv_RT2GD[:, :, 1].transpose(1, 2)

    def write_experts(self, places_P: Tensor, experts_PLK: Tensor) -> None:
        """Write the experts of each of these tokens; places as in `write`."""
        assert self.experts_RTLK is not None
        self.experts_RTLK.flatten(0, 1).index_copy_(0, places_P, experts_PLK.to(self.experts_RTLK.dtype))

    def read_experts(self, row: int, num_tokens: int) -> np.ndarray | None:
        """The experts of a row, a copy [num_tokens, L, K]; None if not recorded."""
        if self.experts_RTLK is None:
            return None
        return self.experts_RTLK[row, :num_tokens].cpu().numpy().copy()

    @contextmanager
    def experts_kept(self) -> Iterator[None]:
        """Context: tokens that are fed again keep the experts of the first time."""
        held = None if self.experts_RTLK is None else self.experts_RTLK.clone()
        yield
        if held is not None:
            self.experts_RTLK = held

    def _allocate_experts(self, num_rows: int, num_tokens: int) -> Tensor | None:
        shape, routing = self.shape, self.shape.routing
        if routing is None:
            return None
        size = (num_rows, num_tokens, len(routing.layers), routing.top_k)
        return torch.zeros(size, dtype=routing.dtype, device=shape.device)

    def _allocate(self, num_rows: int, num_tokens: int) -> Tensor:
        shape = self.shape
        size = (shape.num_layers, num_rows, num_tokens, 2, shape.num_kv_heads, shape.head_dim)
        # Zeros, not garbage: a masked NaN is still a NaN.
        num_bytes = math.prod(size) * shape.dtype.itemsize
        if shape.device.type != "cpu" or num_bytes == 0:
            return torch.zeros(size, dtype=shape.dtype, device=shape.device)
        # The system gives memory to such a page when it is first written, so room beyond the rows' tokens costs none;
        # torch.zeros would write to all of it.
        pages = mmap(-1, num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=shape.dtype).view(size)


def _grow(held: int, needed: int, most: int) -> int:
    return held if needed <= held else min(max(needed, 2 * held), most)
