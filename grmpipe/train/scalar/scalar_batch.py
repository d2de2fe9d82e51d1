"""Sequences with targets for a scalar head, in rounds of one batch per rank. Pure: knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grmpipe.train.batching.seqlen_balancing import Load, deal

NOTHING = (0, 0)  # token ids of an idle rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Classified:
    """A whole sequence, and whether it is right: the target of its last token."""

    token_ids: tuple[int, ...]
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences:
    """Sequences packed end to end. T: packed tokens, S: sequences. Arrays cross process borders as they are."""

    token_ids_T: np.ndarray  # int64
    position_ids_T: np.ndarray  # int64, from 0 in each sequence
    sequence_lengths_S: np.ndarray  # int64, sums to T


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarBatch(PackedSequences):
    """Sequences with the targets of the head."""

    targets_T: np.ndarray  # float32
    weights_T: np.ndarray  # float32, 0 for tokens without a target


def plan_rounds(lengths: Sequence[int], max_tokens: int, world_size: int) -> list[list[list[int]]]:
    """Indices of sequences: [round][rank] -> a batch. Some batches of the last round may be empty.

    max_tokens: packed tokens per batch. A longer sequence gets its own batch.
    """
    return deal(measure_loads(lengths), max_tokens, world_size)


def measure_loads(lengths: Sequence[int]) -> list[Load]:
    return [Load(tokens=length, work=length) for length in lengths]


def pack_sequences(sequences: Sequence[tuple[int, ...]]) -> PackedSequences:
    """Pack token ids end to end. A rank without sequences gets idle work: with unequal rounds the others would wait."""
    sequences = sequences or [NOTHING]
    lengths_S = np.array([len(token_ids) for token_ids in sequences], dtype=np.int64)
    return PackedSequences(
        token_ids_T=np.concatenate([np.asarray(token_ids, dtype=np.int64) for token_ids in sequences]),
        position_ids_T=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths_S]),
        sequence_lengths_S=lengths_S,
    )


def pack_classified(sequences: Sequence[Classified]) -> ScalarBatch:
    """Pack sequences; only the last token of each has a target."""
    packed = pack_sequences([sequence.token_ids for sequence in sequences])
    targets_T = np.zeros(len(packed.token_ids_T), dtype=np.float32)
    weights_T = np.zeros_like(targets_T)
    if sequences:
        last_S = packed.sequence_lengths_S.cumsum() - 1
        targets_T[last_S] = [sequence.right for sequence in sequences]
        weights_T[last_S] = 1.0
    return ScalarBatch(
        token_ids_T=packed.token_ids_T,
        position_ids_T=packed.position_ids_T,
        sequence_lengths_S=packed.sequence_lengths_S,
        targets_T=targets_T,
        weights_T=weights_T,
    )
