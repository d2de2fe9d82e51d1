"""The cache of a batch (keys, values, experts): one slot per row, grown by doubling; and which rows have which slots.

slots:  [ running rows ][ free and parked rows ]     decoding reads the running rows only

A row whose request has finished is parked for its trajectory. The trajectory's next turn begins with the parked tokens
and takes the slot over. A request that shares only a part, such as a sibling or a branch, gets a copy of that part.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
import torch
from torch import Tensor

from grmpipe.models.engines.embedded.prompt_packing import whole_blocks
from grmpipe.models.lm.moe.expert_routing import RoutingShape


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The cache entry of one token: `num_layers` times a key and a value for each of `num_kv_heads`.

    routing: what is kept next to keys and values, for a mixture whose experts are recorded.
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


MIN_SHARED_TOKENS = 16  # below it a copy isn't worth its trouble


@dataclass(slots=True, eq=False, kw_only=True)
class ParkedRow:
    """The cached tokens of a finished request, and their slot. The last sampled token was never fed: it isn't there."""

    model: str
    trajectory_id: str
    group_id: str
    token_ids: tuple[int, ...]
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """The first tokens of a prompt, which a parked row has. `taken`: the prompt has all of its tokens."""

    row: ParkedRow
    num_tokens: int
    taken: bool


class ParkedRows:
    """Parked rows, the oldest first."""

    def __init__(self) -> None:
        self._rows: list[ParkedRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ParkedRow]:
        return iter(self._rows)

    def park(self, row: ParkedRow) -> None:
        self._rows.append(row)

    def drop(self, row: ParkedRow) -> None:
        self._rows.remove(row)

    def drop_oldest(self) -> None:
        del self._rows[0]

    def drop_trajectory(self, trajectory_id: str) -> None:
        self._rows = [row for row in self._rows if row.trajectory_id != trajectory_id]

    def clear(self) -> None:
        self._rows.clear()

    def drop_model(self, model: str) -> None:
        self._rows = [row for row in self._rows if row.model != model]

    def prefix_for(
        self, model: str, trajectory_id: str, group_id: str, token_ids: tuple[int, ...]
    ) -> CachedPrefix | None:
        """The longest beginning of these tokens that this model cached: of the trajectory itself, else of its group.
        None without a trajectory.
        """
        if not trajectory_id:
            return None
        alike = [row for row in self._rows if row.model == model]
        own = [row for row in alike if row.trajectory_id == trajectory_id]
        return _longest(own, token_ids, trajectory_id) or _longest(
            [row for row in alike if row.group_id == group_id], token_ids, trajectory_id
        )


def _longest(rows: list[ParkedRow], token_ids: tuple[int, ...], trajectory_id: str) -> CachedPrefix | None:
    best: CachedPrefix | None = None
    for row in rows:
        shared = num_shared(row.token_ids, token_ids)
        taken = row.trajectory_id == trajectory_id and shared == len(row.token_ids)
        if (taken or shared >= MIN_SHARED_TOKENS) and (best is None or shared > best.num_tokens):
            best = CachedPrefix(row=row, num_tokens=shared, taken=taken)
    return best


def num_shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The number of first tokens in which two sequences agree. Slices are compared, which is faster than tokens."""
    longest = min(len(a), len(b))
    if a[:longest] == b[:longest]:
        return longest
    return bisect_left(range(longest), x=True, key=lambda index: a[: index + 1] != b[: index + 1])


Move = tuple[int, int, int]  # from a place, to a place, tokens


class SlotPlaces:
    """Moves cached tokens between slots. row_block: decoding overwrites as many rows as run, rounded up to it."""

    def __init__(self, slots: KvSlots, row_block: int) -> None:
        self.parked = ParkedRows()
        self._slots, self._row_block = slots, row_block

    def open(self, num_running: int, num_tokens: int, continued: Collection[tuple[CachedPrefix, int]]) -> None:
        """Make room for this many running rows of this many tokens. Parked prefixes are copied to the rows that
        continue them (prefix, place), and parked rows leave the running ones' places.
        """
        self._slots.reserve(num_running, max(num_tokens, self._slots.tokens_per_row))
        if continued or self.parked:
            self.move([(prefix.row.index, place, prefix.num_tokens) for prefix, place in continued], num_running)

    def move(self, running: Sequence[Move], num_running: int) -> None:
        """Move running rows, such as into the places of those that left, and parked rows out of their places."""
        parked = self._new_places(num_running)
        moves = [*running, *((row.index, place, len(row.token_ids)) for row, place in parked.items())]
        if moves := [(source, target, length) for source, target, length in moves if source != target]:
            sources, targets, lengths = zip(*moves, strict=True)
            self._slots.copy(sources, targets, max(lengths))
        for row, place in parked.items():
            row.index = place

    def _new_places(self, num_running: int) -> dict[ParkedRow, int]:
        """Free slots for the parked rows that decoding this many rows would overwrite. Drops rows without a slot, the
        oldest first.
        """
        if not self.parked:
            return {}
        first = whole_blocks(num_running, self._row_block)
        while self.parked and first + len(self.parked) > self._slots.max_rows:
            self.parked.drop_oldest()
        kept = {row.index for row in self.parked if row.index >= first}
        free = (index for index in itertools.count(first) if index not in kept)
        places = {row: next(free) for row in self.parked if row.index < first}
        self._slots.reserve(max([num_running, *(place + 1 for place in places.values())]), self._slots.tokens_per_row)
        return places
