"""The layout of packed samples whose prefixes form a tree. Pure: knows no model.

It is computed on the host, and what attention reads is copied to the device: reading one number there waits for all
that the device still has to do.

S: samples, T: packed tokens. The own tokens of samples are end to end. A sample's prefix lies in other samples: in its
parent's own tokens and before them, in the parent's prefix.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from grmpipe.models.lm.device_copy import copy_to_device
from grmpipe.models.lm.parallel.context_parallel import ContextRanks

CPU = torch.device("cpu")
FEWEST_QUERIES = 16  # rows of fewer are no faster


@dataclass(frozen=True, kw_only=True)
class Prefixes:
    """The prefixes of samples: the first tokens of another sample, its parent. On the host."""

    parents_S: Tensor  # int64, the sample that holds the prefix's last token among its own; without a prefix: itself
    lengths_S: Tensor  # int64, longer than the parent's prefix; 0: no prefix

    @cached_property
    def depth(self) -> int:
        """The largest number of other samples that hold tokens of one sample; at least 1."""
        holders_S, depth = self.parents_S, 1
        while (self.lengths_S[holders_S] > 0).any():
            holders_S, depth = self.parents_S[holders_S], depth + 1
        return depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of each sample, its prefix and its own tokens, end to end; and its queries. K: all keys."""

    places_K: Tensor | None  # int64, among the packed tokens; None: in their order
    starts_S1: Tensor  # int32, S + 1 cumulative lengths, from 0
    max_length: int
    query_starts_S1: Tensor  # the same of own tokens
    max_queries: int


@dataclass(frozen=True, kw_only=True)
class PaddedRows:
    """Samples that attend in one call, padded. N: samples, Q: maximum of own tokens, K: maximum of all tokens.

    Padding repeats a sample's last token: none of its queries sees that key, and that query is never read.
    """

    queries_NQ: Tensor  # int64, places among the packed tokens
    keys_NK: Tensor
    prefix_lengths_N: Tensor | None  # None: no prefixes, and each query sees as many keys as its place says
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # window -> mask: the same in all layers

    def make_mask(self, window: int | None) -> Tensor | None:
        """Which keys each query sees: up to its own position, and within the window. None: plain causal attention."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        if self.prefix_lengths_N is None and (window is None or window >= self.keys_NK.shape[1]):
            return None
        behind_NQK = self._behind_NQK
        return behind_NQK >= 0 if window is None else (behind_NQK >= 0) & (behind_NQK < window)

    @cached_property
    def _behind_NQK(self) -> Tensor:
        """The number of tokens by which a key is before a query. [1, Q, K] if it is the same for all samples."""
        device = self.queries_NQ.device
        own_Q, keys_K = (torch.arange(places.shape[1], device=device) for places in (self.queries_NQ, self.keys_NK))
        positions_NQ = own_Q[None] if self.prefix_lengths_N is None else self.prefix_lengths_N[:, None] + own_Q
        return positions_NQ[:, :, None] - keys_K


class Packing:
    """The packing of a micro-batch. What all layers need is computed once, when the first of them asks."""

    def __init__(
        self,
        lengths_S: Tensor,
        prefixes: Prefixes | None = None,
        context: ContextRanks | None = None,
        device: torch.device = CPU,
    ) -> None:
        """lengths_S: int64, of own tokens, on the host; sums to T. context: the ranks that hold a slice of the tokens
        each. device: the one of attention.
        """
        self.context = context
        self._device = device
        self._lengths_S = lengths_S
        self._ends_S = lengths_S.cumsum(0)
        self._starts_S = self._ends_S - lengths_S
        shares = prefixes is not None and bool(prefixes.lengths_S.any())
        self._prefixes = prefixes if shares else None

    @cached_property
    def num_tokens(self) -> int:
        """T, on all ranks of a context group together."""
        return int(self._ends_S[-1])

    @cached_property
    def before_T(self) -> Tensor:
        """The place of the token before each one in its sample; the token's own place if there is none. On the host."""
        before_T = torch.arange(self.num_tokens) - 1
        before_T[self._starts_S] = self._starts_S
        if self._prefixes is not None:
            last_S = self._offsets_S[self._prefixes.parents_S] + self._prefixes.lengths_S - 1
            before_T[self._starts_S] = torch.where(self._prefixes.lengths_S > 0, last_S, self._starts_S)
        return before_T

    @cached_property
    def _offsets_S(self) -> Tensor:
        """What is added to the position of a sample's own token to find its place."""
        return self._starts_S if self._prefixes is None else self._starts_S - self._prefixes.lengths_S

    def copy_to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors of the host where attention is: in one copy, if that is elsewhere."""
        return list(tensors) if self._device == CPU else copy_to_device([t.numpy() for t in tensors], self._device)

    @cached_property
    def keys(self) -> Keys:
        own_S1, max_queries = _cumulate(self._ends_S), int(self._lengths_S.max())
        if self._prefixes is None:
            (own_S1,) = self.copy_to_device(own_S1)
            return Keys(
                places_K=None, starts_S1=own_S1, max_length=max_queries, query_starts_S1=own_S1, max_queries=max_queries
            )
        lengths_S = self._prefixes.lengths_S + self._lengths_S
        max_length = int(lengths_S.max())
        is_there_SK = torch.arange(max_length) < lengths_S[:, None]
        places_K = self._first_tokens(torch.arange(len(lengths_S)), max_length)[is_there_SK]
        places_K, starts_S1, own_S1 = self.copy_to_device(places_K, _cumulate(lengths_S.cumsum(0)), own_S1)
        return Keys(
            places_K=places_K,
            starts_S1=starts_S1,
            max_length=max_length,
            query_starts_S1=own_S1,
            max_queries=max_queries,
        )

    @cached_property
    def rows(self) -> tuple[PaddedRows, ...]:
        """All samples; those whose own tokens need the same power of two are together."""
        return tuple(self._rows(samples_N) for samples_N in self._by_size)

    @cached_property
    def slots_T(self) -> Tensor:
        """The place of each token's query in all rows end to end."""
        slots_T, first = torch.empty_like(self.before_T), 0
        for samples_N, rows in zip(self._by_size, self.rows, strict=True):
            own_Q = torch.arange(rows.queries_NQ.shape[1])
            is_own_NQ = own_Q < self._lengths_S[samples_N, None]
            slots_T[(self._starts_S[samples_N, None] + own_Q)[is_own_NQ]] = (
                first + is_own_NQ.flatten().nonzero().squeeze(-1)
            )
            first += is_own_NQ.numel()
        return self.copy_to_device(slots_T)[0]

    @cached_property
    def _by_size(self) -> tuple[Tensor, ...]:
        """The samples of each row."""
        sizes_S = self._lengths_S.clamp(min=FEWEST_QUERIES)
        powers_S = (2 * sizes_S - 1).double().log2().long()  # from 17 to 32 tokens: 5
        return tuple((powers_S == power).nonzero().squeeze(-1) for power in powers_S.unique().tolist())

    def _rows(self, samples_N: Tensor) -> PaddedRows:
        own_N = self._lengths_S[samples_N]
        own_Q = torch.arange(int(own_N.max()))
        queries_NQ = (self._starts_S[samples_N, None] + own_Q).minimum(self._ends_S[samples_N, None] - 1)
        prefix_N = None if self._prefixes is None else self._prefixes.lengths_S[samples_N]
        if prefix_N is None or not prefix_N.any():
            (queries_NQ,) = self.copy_to_device(queries_NQ)
            return PaddedRows(queries_NQ=queries_NQ, keys_NK=queries_NQ, prefix_lengths_N=None)
        keys_NK = self._first_tokens(samples_N, int((prefix_N + own_N).max()))
        queries_NQ, keys_NK, prefix_N = self.copy_to_device(queries_NQ, keys_NK, prefix_N)
        return PaddedRows(queries_NQ=queries_NQ, keys_NK=keys_NK, prefix_lengths_N=prefix_N)

    def _first_tokens(self, samples_N: Tensor, number: int) -> Tensor:
        """[N, number]: the places of the first tokens of these samples, including their prefixes."""
        assert self._prefixes is not None
        positions_K = torch.arange(number)
        found_NK = (self._offsets_S[samples_N, None] + positions_K).minimum(self._ends_S[samples_N, None] - 1)
        holders_N = samples_N
        for _ in range(self._prefixes.depth):
            prefix_N1 = self._prefixes.lengths_S[holders_N, None]
            holders_N = self._prefixes.parents_S[holders_N]
            found_NK = torch.where(positions_K < prefix_N1, self._offsets_S[holders_N, None] + positions_K, found_NK)
        return found_NK


def _cumulate(ends_S: Tensor) -> Tensor:
    """int32, S + 1: the ends, and 0 before them."""
    return F.pad(ends_S, (1, 0)).int()
