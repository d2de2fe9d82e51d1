"""Packs samples into rounds of micro-batches, one per rank. Pure: knows lengths, not models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from grmpipe.models.types import ANY_EXPERT, TokenScores
from grmpipe.train.batching.prefix_tree import PrefixTree, build_trees
from grmpipe.train.batching.seqlen_balancing import deal, fill
from grmpipe.types import MicroBatch, TeacherEntries, TrainingSample

NOT_SAMPLED = -1
NOTHING = TrainingSample(
    group_id="", sibling=0, segment=0, token_ids=(0, 0), loss_mask=(0, 0), sampler_logprobs=(0.0, 0.0),
    advantages=(0.0, 0.0), versions=(),
)  # fmt: skip
EARLY_SHARE = 0.25  # the least share of a micro-batch: a pass over fewer tokens costs more than its early start saves
PIECES_PER_RANK = 2  # for several ranks: whole groups can't be dealt evenly, and each piece repeats its prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRound:
    """One micro-batch per rank, in rank order: what all ranks process at the same time. Here ranks that share
    samples are one rank.

    samples: those of each rank, in packed order; they stay on the driver.
    """

    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[tuple[TrainingSample, ...], ...] = ()


class Packer:
    """Collects samples until every rank has a micro-batch's worth. All ranks always take part in a round.

    max_tokens: packed tokens per micro-batch. A longer sample gets its own micro-batch.
    shared: siblings stay together, and what they have in common is packed once.
    whole_rollouts: all samples of a rollout are in one micro-batch. A rollout longer than one gets its own.
    """

    def __init__(self, max_tokens: int, world_size: int, shared: bool = True, whole_rollouts: bool = False) -> None:
        self._max_tokens = max_tokens
        self._world_size = world_size
        self._shared = shared
        self._whole_rollouts = whole_rollouts
        self._waiting: list[PrefixTree] = []

    def add(self, samples: Sequence[TrainingSample]) -> list[MicroBatchRound]:
        """Add samples; return the rounds that are full. Samples added together are packed together if they are
        siblings.
        """
        self._waiting += build_trees(samples, self._shared, self._whole_rollouts)
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
        # Into trees again: pieces of a split group that are left over share their prompt with each other.
        rest = _samples(pieces[place] for place in sorted(left_over))
        self._waiting = build_trees(rest, self._shared, self._whole_rollouts)
        return _round([[pieces[place] for place in places] for places in bins])


def pack_rounds(
    samples: Sequence[TrainingSample],
    max_tokens: int,
    world_size: int,
    shared: bool = True,
    whole_rollouts: bool = False,
) -> list[MicroBatchRound]:
    """Pack all samples, evenly over ranks and rounds."""
    return _dealt(build_trees(samples, shared, whole_rollouts), max_tokens, world_size)


def num_tokens(trees: Sequence[PrefixTree]) -> int:
    """The number of packed tokens."""
    return sum(tree.load.tokens for tree in trees)


def _dealt(trees: Sequence[PrefixTree], max_tokens: int, world_size: int) -> list[MicroBatchRound]:
    pieces = _pieces(trees, max_tokens, world_size)
    dealt = deal([piece.load for piece in pieces], max_tokens, world_size)
    return [_round([[pieces[place] for place in places] for places in bins]) for bins in dealt]


def _pieces(trees: Sequence[PrefixTree], max_tokens: int, world_size: int) -> list[PrefixTree]:
    """Split trees to at most a micro-batch each; with several ranks, to at most a part of a rank's share."""
    share, limit = num_tokens(trees) / world_size, max_tokens
    if world_size > 1:
        num_rounds = max(1, math.ceil(share / max_tokens))
        limit = math.ceil(share / num_rounds / PIECES_PER_RANK)
    return [piece for tree in trees for piece in tree.split(limit)]


def _round(trees_by_rank: Sequence[Sequence[PrefixTree]]) -> MicroBatchRound:
    return MicroBatchRound(
        micro_batches=tuple(pack_trees(trees) if trees else idle() for trees in trees_by_rank),
        samples=tuple(_samples(trees) for trees in trees_by_rank),
    )


def _samples(trees: Iterable[PrefixTree]) -> tuple[TrainingSample, ...]:
    return tuple(sample for tree in trees for sample in tree.samples)


def pack(samples: Sequence[TrainingSample]) -> MicroBatch:
    """Pack samples end to end, each with all its tokens."""
    return pack_trees([PrefixTree.copy_samples([sample]) for sample in samples])


def pack_trees(trees: Sequence[PrefixTree]) -> MicroBatch:
    """Pack trees end to end. The first token of each tree is never trained: nothing predicts it."""
    samples = _samples(trees)
    prefix_lengths_S = np.array([shared for tree in trees for shared in tree.shared], dtype=np.int64)
    lengths_S = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64) - prefix_lengths_S
    starts_S = lengths_S.cumsum() - lengths_S
    sizes_F = np.array([len(tree.samples) for tree in trees])
    parents = np.array([parent for tree in trees for parent in tree.parents], dtype=np.int64)
    layout = PackedLayout(
        offsets_S=starts_S - prefix_lengths_S,
        parents_S=parents + (sizes_F.cumsum() - sizes_F).repeat(sizes_F),
        prefix_lengths_S=prefix_lengths_S,
    )
    experts = _experts_of(samples)
    return MicroBatch(
        token_ids_T=_own([sample.token_ids for sample in samples], prefix_lengths_S, np.int64),
        position_ids_T=np.arange(lengths_S.sum(), dtype=np.int64) - layout.offsets_S.repeat(lengths_S),
        sample_lengths_S=lengths_S,
        parents_S=layout.parents_S,
        prefix_lengths_S=prefix_lengths_S,
        **_entries(samples, layout),
        experts_TLK=None if experts is None else _own(experts, prefix_lengths_S, np.int16),
    )


def _own(
    columns: Sequence[Sequence[int] | np.ndarray], prefix_lengths_S: np.ndarray, dtype: type[np.generic]
) -> np.ndarray:
    """The entries of each sample after its prefix, end to end."""
    both = zip(columns, prefix_lengths_S.tolist(), strict=True)
    return np.concatenate([np.asarray(column[shared:], dtype=dtype) for column, shared in both])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Where the tokens of samples are packed.

    offsets_S: what is added to the position of a sample's own token to find its place.
    """

    offsets_S: np.ndarray
    parents_S: np.ndarray
    prefix_lengths_S: np.ndarray

    @staticmethod
    def of(micro_batch: MicroBatch) -> PackedLayout:
        ends_S = micro_batch.sample_lengths_S.cumsum()
        return PackedLayout(
            offsets_S=ends_S - micro_batch.sample_lengths_S - micro_batch.prefix_lengths_S,
            parents_S=micro_batch.parents_S,
            prefix_lengths_S=micro_batch.prefix_lengths_S,
        )

    def places(self, sample: int, positions_P: np.ndarray) -> np.ndarray:
        """The packed tokens at these positions of a sample, its prefix included."""
        found_P = self.offsets_S[sample] + positions_P
        while (in_prefix_P := positions_P < self.prefix_lengths_S[sample]).any():
            sample = self.parents_S[sample]
            found_P = np.where(in_prefix_P, self.offsets_S[sample] + positions_P, found_P)
        return np.asarray(found_P)


class _Entries(TypedDict):
    places_E: np.ndarray
    rollout_lengths_R: np.ndarray
    loss_mask_E: np.ndarray
    sampler_logprobs_E: np.ndarray
    advantages_E: np.ndarray
    versions_E: np.ndarray
    teacher: TeacherEntries | None


def _entries(samples: Sequence[TrainingSample], layout: PackedLayout) -> _Entries:
    """The entries of each sample: the tokens of its prefix that it trains, then its own tokens."""
    places_S: list[np.ndarray] = []
    positions_S: list[np.ndarray | slice] = []
    for place, (sample, shared) in enumerate(zip(samples, layout.prefix_lengths_S.tolist(), strict=True)):
        own_P = np.arange(shared, len(sample.token_ids))
        if not any(sample.loss_mask[:shared]):
            positions_S.append(slice(shared, None))
            places_S.append(layout.offsets_S[place] + own_P)
            continue
        positions_P = np.concatenate([np.flatnonzero(sample.loss_mask[:shared]), own_P])
        positions_S.append(positions_P)
        places_S.append(layout.places(place, positions_P))
    by_rollout: dict[tuple[str, int], list[int]] = {}
    for place, sample in enumerate(samples):
        by_rollout.setdefault((sample.group_id, sample.sibling), []).append(place)
    # A rollout's entries follow each other, also those of several segments: the loss cuts them by their number.
    order = [place for places in by_rollout.values() for place in places]

    def join(columns: Sequence[Sequence[float] | np.ndarray], dtype: type[np.generic]) -> np.ndarray:
        return np.concatenate([_picked(columns[place], positions_S[place], dtype) for place in order])

    # Nothing predicts the first token of a sample, whatever its mask says.
    loss_mask_E = join([(0, *sample.loss_mask[1:]) for sample in samples], np.float32)
    versions_E = join([spread_versions(sample) for sample in samples], np.int32)
    assert not (loss_mask_E * (versions_E == NOT_SAMPLED)).any(), "only what was sampled is trained"
    return {
        "places_E": np.concatenate([places_S[place] for place in order]),
        "rollout_lengths_R": np.array(
            [sum(len(places_S[place]) for place in places) for places in by_rollout.values()], dtype=np.int64
        ),
        "loss_mask_E": loss_mask_E,
        "sampler_logprobs_E": join([sample.sampler_logprobs for sample in samples], np.float32),
        "advantages_E": join([sample.advantages for sample in samples], np.float32),
        "versions_E": versions_E,
        "teacher": _teacher_of([samples[place] for place in order], [positions_S[place] for place in order]),
    }


def _teacher_of(samples: Sequence[TrainingSample], positions_S: Sequence[np.ndarray | slice]) -> TeacherEntries | None:
    """The entries of teachers; None if none scored any of these samples."""
    known = next((sample.teacher for sample in samples if sample.teacher is not None), None)
    if known is None:
        return None

    def join(read: Callable[[TokenScores], np.ndarray | None], dtype: type[np.generic]) -> np.ndarray | None:
        if (like := read(known)) is None:
            return None
        columns = []
        for sample, positions in zip(samples, positions_S, strict=True):
            column = None if sample.teacher is None else read(sample.teacher)
            whole = np.zeros((len(sample.token_ids), *like.shape[1:])) if column is None else column
            columns.append(whole[positions].astype(dtype))
        return np.concatenate(columns)

    taught = [
        np.array((0, *sample.loss_mask[1:]), np.float32)[positions] * (sample.teacher is not None)
        for sample, positions in zip(samples, positions_S, strict=True)
    ]
    logprobs_E = join(lambda scores: scores.logprobs_N, np.float32)
    assert logprobs_E is not None
    return TeacherEntries(
        taught_E=np.concatenate(taught).astype(np.float32),
        logprobs_E=logprobs_E,
        top_ids_EK=join(lambda scores: scores.top_ids_NK, np.int64),
        top_logprobs_EK=join(lambda scores: scores.top_logprobs_NK, np.float32),
    )


def _picked(column: Sequence[float] | np.ndarray, positions: np.ndarray | slice, dtype: type[np.generic]) -> np.ndarray:
    if isinstance(positions, slice):
        return np.asarray(column[positions], dtype=dtype)
    return np.array([column[position] for position in positions.tolist()], dtype=dtype)


def spread_versions(sample: TrainingSample) -> np.ndarray:
    """The version that sampled each token, [T] int32; NOT_SAMPLED for tokens of prompts."""
    versions_T = np.full(len(sample.token_ids), NOT_SAMPLED, dtype=np.int32)
    for span in sample.versions:
        versions_T[span.start : span.end] = span.version
    return versions_T


def idle() -> MicroBatch:
    """A micro-batch for a rank without work: with unequal rounds the others would wait in a collective."""
    return pack([NOTHING])


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
