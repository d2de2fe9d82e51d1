"""Sequences with targets for a scalar head, in rounds of one batch per rank. Pure: knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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


def plan_rounds(lengths: Sequence[int], max_tokens: int, world_size: int) -> list[tuple[tuple[int, ...], ...]]:
    """Indices of sequences: [round][rank] -> a batch. Batches have about the same size; some of the last round may be
    empty.

    max_tokens: packed tokens per batch. A longer sequence gets its own batch.
    """
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        fitting = next((bin_ for bin_, load in enumerate(loads) if load + lengths[index] <= max_tokens), len(bins))
        if fitting == len(bins):
            bins.append([])
            loads.append(0)
        bins[fitting].append(index)
        loads[fitting] += lengths[index]
    heaviest_first = sorted(range(len(bins)), key=lambda bin_: loads[bin_], reverse=True)
    batches = [tuple(bins[bin_]) for bin_ in heaviest_first] + [()] * (-len(bins) % world_size)
    return [tuple(batches[start : start + world_size]) for start in range(0, len(batches), world_size)]


def pack_classified(sequences: Sequence[Classified]) -> ScalarBatch:
    """Pack sequences; only the last token of each has a target."""
    if not sequences:
        return idle()
    lengths_S = np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.int64)
    last_S = lengths_S.cumsum() - 1
    targets_T = np.zeros(lengths_S.sum(), dtype=np.float32)
    weights_T = np.zeros_like(targets_T)
    targets_T[last_S] = [sequence.right for sequence in sequences]
    weights_T[last_S] = 1.0
    return ScalarBatch(
        token_ids_T=np.concatenate([np.asarray(sequence.token_ids, dtype=np.int64) for sequence in sequences]),
        position_ids_T=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths_S]),
        sequence_lengths_S=lengths_S,
        targets_T=targets_T,
        weights_T=weights_T,
    )


def idle() -> ScalarBatch:
    """A batch for a rank without work: with unequal rounds the others would wait in a collective."""
    nothing_T = np.zeros(2, dtype=np.float32)
    return ScalarBatch(
        token_ids_T=np.zeros(2, dtype=np.int64),
        position_ids_T=np.arange(2, dtype=np.int64),
        sequence_lengths_S=np.array([2], dtype=np.int64),
        targets_T=nothing_T,
        weights_T=nothing_T,
    )
