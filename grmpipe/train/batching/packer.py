"""Packs samples into rounds of micro-batches, one per rank. Pure: knows lengths, not models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from grmpipe.train.batching.bin_packing import deal, fill
from grmpipe.train.batching.shared_prefix import SharedPrefixGroup, prefix_groups_of
from grmpipe.types import MicroBatch, TrainingSample
from models.types import ANY_EXPERT

NOT_SAMPLED = -1
EARLY_SHARE = 0.25  # of a micro-batch: a pass over fewer tokens costs more than its early start saves
PIECES_PER_RANK = 2  # for several ranks: whole groups can't be dealt evenly, and each piece repeats its prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRound:
    """One micro-batch per rank, in rank order: what all ranks process at the same time.

    samples: those of each rank, in packed order; they stay on the driver.
    """

    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[tuple[TrainingSample, ...], ...] = ()


class Packer:
    """Collects samples until every rank has a micro-batch's worth. All ranks always take part in a round.

    max_tokens: packed tokens per micro-batch. A longer sample gets its own micro-batch.
    shared: siblings stay together, and their common prefix is packed once.
    """

    def __init__(self, max_tokens: int, world_size: int, shared: bool = True) -> None:
        self._max_tokens = max_tokens
        self._world_size = world_size
        self._shared = shared
        self._waiting: list[SharedPrefixGroup] = []

    def add(self, samples: Sequence[TrainingSample]) -> list[MicroBatchRound]:
        """Add samples; return the rounds that are full. Samples added together are packed together if they are
        siblings.
        """
        self._waiting += prefix_groups_of(samples, self._shared)
        rounds = []
        while num_tokens(self._waiting) >= self._max_tokens * self._world_size:
            rounds.append(self._next_round())
        return rounds

    def early(self) -> list[MicroBatchRound]:
        """Rounds of the waiting samples, for an idle learner. None if they are too few for a pass."""
        enough = EARLY_SHARE * self._max_tokens * self._world_size
        return self.flush() if num_tokens(self._waiting) >= enough else []

    def flush(self) -> list[MicroBatchRound]:
        """Return the remaining samples in rounds."""
        rest = self._waiting
        self.discard()
        return _dealt(rest, self._max_tokens, self._world_size)

    def discard(self) -> None:
        """Drop the waiting samples, because their batch was dropped."""
        self._waiting = []

    def _next_round(self) -> MicroBatchRound:
        """A round of the longest waiting samples, evenly over the ranks."""
        pieces = _pieces(self._waiting, self._max_tokens, self._world_size)
        bins, left_over = fill([piece.load for piece in pieces], self._max_tokens, self._world_size)
        self._waiting = prefix_groups_of(_samples(pieces[place] for place in sorted(left_over)), self._shared)
        return _round([[pieces[place] for place in places] for places in bins])


def rounds_of(
    samples: Sequence[TrainingSample], max_tokens: int, world_size: int, shared: bool = True
) -> list[MicroBatchRound]:
    """Pack all samples, evenly over ranks and rounds."""
    return _dealt(prefix_groups_of(samples, shared), max_tokens, world_size)


def num_tokens(prefix_groups: Sequence[SharedPrefixGroup]) -> int:
    """The number of packed tokens."""
    return sum(prefix_group.load.tokens for prefix_group in prefix_groups)


def _dealt(prefix_groups: Sequence[SharedPrefixGroup], max_tokens: int, world_size: int) -> list[MicroBatchRound]:
    pieces = _pieces(prefix_groups, max_tokens, world_size)
    dealt = deal([piece.load for piece in pieces], max_tokens, world_size)
    return [_round([[pieces[place] for place in places] for places in bins]) for bins in dealt]


def _pieces(prefix_groups: Sequence[SharedPrefixGroup], max_tokens: int, world_size: int) -> list[SharedPrefixGroup]:
    """Split prefix groups to at most a micro-batch each; with several ranks, to at most a part of a rank's share."""
    share, limit = num_tokens(prefix_groups) / world_size, max_tokens
    if world_size > 1:
        num_rounds = max(1, math.ceil(share / max_tokens))
        limit = math.ceil(share / num_rounds / PIECES_PER_RANK)
    return [piece for prefix_group in prefix_groups for piece in prefix_group.split(limit)]


def _round(prefix_groups_by_rank: Sequence[Sequence[SharedPrefixGroup]]) -> MicroBatchRound:
    return MicroBatchRound(
        micro_batches=tuple(
            pack_prefix_groups(prefix_groups) if prefix_groups else idle() for prefix_groups in prefix_groups_by_rank
        ),
        samples=tuple(_samples(prefix_groups) for prefix_groups in prefix_groups_by_rank),
    )


def _samples(prefix_groups: Iterable[SharedPrefixGroup]) -> tuple[TrainingSample, ...]:
    return tuple(sample for prefix_group in prefix_groups for sample in prefix_group.samples)


def pack(samples: Sequence[TrainingSample]) -> MicroBatch:
    """Pack samples end to end, each with all its tokens."""
    return pack_prefix_groups([SharedPrefixGroup((sample,), 0) for sample in samples])


def pack_prefix_groups(prefix_groups: Sequence[SharedPrefixGroup]) -> MicroBatch:
    """Pack prefix groups end to end. A shared prefix comes first and counts as part of the group's first sample in all
    arrays over tokens. The first token of each prefix group is never trained: nothing predicts it.
    """
    samples = _samples(prefix_groups)
    prefix_lengths_S = np.array(
        [
            prefix_group.num_shared * (place > 0)
            for prefix_group in prefix_groups
            for place in range(len(prefix_group.samples))
        ],
        dtype=np.int64,
    )
    lengths_S = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64) - prefix_lengths_S
    starts_S = lengths_S.cumsum() - lengths_S
    sizes_F = np.array([len(prefix_group.samples) for prefix_group in prefix_groups])
    position_ids_T = np.arange(lengths_S.sum(), dtype=np.int64) - (starts_S - prefix_lengths_S).repeat(lengths_S)

    def join(columns: Iterable[Sequence[float] | np.ndarray], dtype: type[np.generic]) -> np.ndarray:
        own = zip(columns, prefix_lengths_S.tolist(), strict=True)
        return np.concatenate([np.asarray(column[shared:], dtype=dtype) for column, shared in own])

    loss_mask_T = join((sample.loss_mask for sample in samples), np.float32) * (position_ids_T > 0)
    versions_T = join(map(versions_of, samples), np.int32)
    assert not (loss_mask_T * (versions_T == NOT_SAMPLED)).any(), "only what was sampled is trained"
    experts = _experts_of(samples)
    return MicroBatch(
        token_ids_T=join((sample.token_ids for sample in samples), np.int64),
        position_ids_T=position_ids_T,
        sample_lengths_S=lengths_S,
        prefix_starts_S=starts_S[sizes_F.cumsum() - sizes_F].repeat(sizes_F),
        prefix_lengths_S=prefix_lengths_S,
        loss_mask_T=loss_mask_T,
        sampler_logprobs_T=join((sample.sampler_logprobs for sample in samples), np.float32),
        advantages_T=join((sample.advantages for sample in samples), np.float32),
        versions_T=versions_T,
        experts_TLK=None if experts is None else join(experts, np.int16),
    )


def versions_of(sample: TrainingSample) -> np.ndarray:
    """The version that sampled each token, [T] int32; NOT_SAMPLED for tokens of prompts."""
    versions_T = np.full(len(sample.token_ids), NOT_SAMPLED, dtype=np.int32)
    for span in sample.versions:
        versions_T[span.start : span.end] = span.version
    return versions_T


def idle() -> MicroBatch:
    """A micro-batch for a rank without work: with unequal rounds the others would wait in a collective."""
    nothing_T = np.zeros(2, dtype=np.float32)
    return MicroBatch(
        token_ids_T=np.zeros(2, dtype=np.int64),
        position_ids_T=np.arange(2, dtype=np.int64),
        sample_lengths_S=np.array([2], dtype=np.int64),
        prefix_starts_S=np.zeros(1, dtype=np.int64),
        prefix_lengths_S=np.zeros(1, dtype=np.int64),
        loss_mask_T=nothing_T,
        sampler_logprobs_T=nothing_T,
        advantages_T=nothing_T,
        versions_T=np.full(2, NOT_SAMPLED, dtype=np.int32),
    )


def _experts_of(samples: Sequence[TrainingSample]) -> list[np.ndarray] | None:
    """The experts of each sample; None if no sample has any."""
    known = next((sample.experts_TLK for sample in samples if sample.experts_TLK is not None), None)
    if known is None:
        return None
    unknown_LK = np.full(known.shape[1:], ANY_EXPERT, dtype=np.int16)
    return [
        np.broadcast_to(unknown_LK, (len(sample.token_ids), *unknown_LK.shape))
        if sample.experts_TLK is None
        else sample.experts_TLK
        for sample in samples
    ]
