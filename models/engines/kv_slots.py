"""Keys and values of a running batch, a slot per row, preallocated and grown by doubling. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What one token leaves in the cache: `num_layers` times a key and a value for each of `num_kv_heads`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class KvSlots:
    """One tensor [N, R, T, 2, G, D]. N: layers, R: rows, T: token positions, 2: key and value, G: KV heads, D: head.

    Attention reads the first rows as they lie, so that the running rows must stay compact: `copy` moves them.
    """

    def __init__(self, shape: KvShape, max_rows: int, max_tokens: int) -> None:
        self.shape = shape
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self.kv_NRT2GD = self._allocate(0, 0)

    @property
    def tokens_per_row(self) -> int:
        return self.kv_NRT2GD.shape[2]

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room for this many rows of this many tokens. What is held stays, views taken before are void."""
        assert num_rows <= self._max_rows and num_tokens <= self._max_tokens
        rows, tokens = self.kv_NRT2GD.shape[1:3]
        if num_rows <= rows and num_tokens <= tokens:
            return
        grown = self._allocate(_grow(rows, num_rows, self._max_rows), _grow(tokens, num_tokens, self._max_tokens))
        grown[:, :rows, :tokens] = self.kv_NRT2GD
        self.kv_NRT2GD = grown

    def give_up(self) -> int:
        """Hold nothing any more; returns the bytes that this frees. Rows grow anew."""
        num_bytes = self.kv_NRT2GD.untyped_storage().nbytes()
        self.kv_NRT2GD = self._allocate(0, 0)
        return num_bytes

    def copy(self, sources: Sequence[int], targets: Sequence[int], num_tokens: int) -> None:
        """The first tokens of the source rows, to the target rows. A row may be copied to many."""
        kv = self.kv_NRT2GD
        kv[:, list(targets), :num_tokens] = kv[:, list(sources), :num_tokens]

    def write(self, layer: int, places_P: Tensor, keys_and_values_PC: Tensor) -> None:
        """One key-and-value (C = 2 G D) for each place, which is row * tokens_per_row + position."""
        self.kv_NRT2GD[layer].flatten(0, 1).flatten(1).index_copy_(0, places_P, keys_and_values_PC)

    def read(self, layer: int, rows: slice | Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, G, num_tokens, D]: views for a slice, copies for an index."""
        kv_RT2GD = self.kv_NRT2GD[layer, rows, :num_tokens]
        return kv_RT2GD[:, :, 0].transpose(1, 2), kv_RT2GD[:, :, 1].transpose(1, 2)

    def _allocate(self, num_rows: int, num_tokens: int) -> Tensor:
        shape = self.shape
        # Zeros, not garbage: a masked NaN is still a NaN.
        return torch.zeros(
            (shape.num_layers, num_rows, num_tokens, 2, shape.num_kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )


def _grow(held: int, needed: int, most: int) -> int:
    return held if needed <= held else min(max(needed, 2 * held), most)
