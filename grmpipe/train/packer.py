"""Samples into rounds of micro-batches, one per rank. Pure: knows lengths, not models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grmpipe.train.balance import deal, fill
from grmpipe.types import MicroBatch, TrainingSample
from models.types import ANY_EXPERT

NOT_SAMPLED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One micro-batch per rank, in rank order: what all ranks pass through the model at the same time.

    samples: of each rank, as they are packed; nothing of them goes to the ranks.
    """

    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[tuple[TrainingSample, ...], ...] = ()


class Packer:
    """Collects samples until every rank has a micro-batch's worth. All ranks always take part in a round.

    max_tokens: packed tokens per micro-batch. A longer sample gets a micro-batch of its own.
    """

    def __init__(self, max_tokens: int, world_size: int) -> None:
        self._max_tokens = max_tokens
        self._world_size = world_size
        self._waiting: list[TrainingSample] = []
        self._waiting_tokens = 0

    def add(self, samples: Sequence[TrainingSample]) -> list[Round]:
        """Take samples; return the rounds that are full."""
        self._waiting += samples
        self._waiting_tokens += sum(_lengths(samples))
        rounds = []
        while self._waiting_tokens >= self._max_tokens * self._world_size:
            rounds.append(self._next_round())
        return rounds

    def flush(self) -> list[Round]:
        """The rounds that hold the rest."""
        rest = self._waiting
        self.discard()
        return rounds_of(rest, self._max_tokens, self._world_size)

    def discard(self) -> None:
        """Forget what waits: its batch was dropped."""
        self._waiting = []
        self._waiting_tokens = 0

    def _next_round(self) -> Round:
        """The longest that wait, evenly over the ranks."""
        samples = self._waiting
        bins, left_over = fill(_lengths(samples), self._max_tokens, self._world_size)
        self._waiting = [samples[place] for place in left_over]
        self._waiting_tokens = sum(_lengths(self._waiting))
        return _round([[samples[place] for place in places] for places in bins])


def rounds_of(samples: Sequence[TrainingSample], max_tokens: int, world_size: int) -> list[Round]:
    """All samples at once, evenly over ranks and rounds."""
    dealt = deal(_lengths(samples), max_tokens, world_size)
    return [_round([[samples[place] for place in places] for places in bins]) for bins in dealt]


def _round(samples_by_rank: Sequence[Sequence[TrainingSample]]) -> Round:
    return Round(
        micro_batches=tuple(pack(samples) if samples else idle() for samples in samples_by_rank),
        samples=tuple(tuple(samples) for samples in samples_by_rank),
    )


def _lengths(samples: Sequence[TrainingSample]) -> list[int]:
    return [len(sample.token_ids) for sample in samples]


def pack(samples: Sequence[TrainingSample]) -> MicroBatch:
    """Samples end to end. The first token of each is never trained: nothing predicts it."""
    lengths_S = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64)
    starts_S = lengths_S.cumsum() - lengths_S
    position_ids_T = np.arange(lengths_S.sum(), dtype=np.int64) - starts_S.repeat(lengths_S)
    loss_mask_T = _join([sample.loss_mask for sample in samples], np.float32) * (position_ids_T > 0)
    versions_T = np.concatenate([versions_of(sample) for sample in samples])
    assert not (loss_mask_T * (versions_T == NOT_SAMPLED)).any(), "only what was sampled is trained"
    return MicroBatch(
        token_ids_T=_join([sample.token_ids for sample in samples], np.int64),
        position_ids_T=position_ids_T,
        sample_lengths_S=lengths_S,
        loss_mask_T=loss_mask_T,
        sampler_logprobs_T=_join([sample.sampler_logprobs for sample in samples], np.float32),
        advantages_T=_join([sample.advantages for sample in samples], np.float32),
        versions_T=versions_T,
        experts_TLK=_join_experts(samples),
    )


def versions_of(sample: TrainingSample) -> np.ndarray:
    """[T] int32: who sampled each token; NOT_SAMPLED where nobody did."""
    versions_T = np.full(len(sample.token_ids), NOT_SAMPLED, dtype=np.int32)
    for span in sample.versions:
        versions_T[span.start : span.end] = span.version
    return versions_T


def idle() -> MicroBatch:
    """Work for a rank that has none: unequal rounds would leave the others waiting in a collective."""
    nothing_T = np.zeros(2, dtype=np.float32)
    return MicroBatch(
        token_ids_T=np.zeros(2, dtype=np.int64),
        position_ids_T=np.arange(2, dtype=np.int64),
        sample_lengths_S=np.array([2], dtype=np.int64),
        loss_mask_T=nothing_T,
        sampler_logprobs_T=nothing_T,
        advantages_T=nothing_T,
        versions_T=np.full(2, NOT_SAMPLED, dtype=np.int32),
    )


def _join(columns: Sequence[Sequence[float]], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.asarray(column, dtype=dtype) for column in columns])


def _join_experts(samples: Sequence[TrainingSample]) -> np.ndarray | None:
    """None where no sample knows any."""
    known = next((sample.experts_TLK for sample in samples if sample.experts_TLK is not None), None)
    if known is None:
        return None
    return np.concatenate([_experts_of(sample, known.shape[1:]) for sample in samples])


def _experts_of(sample: TrainingSample, shape: tuple[int, ...]) -> np.ndarray:
    if sample.experts_TLK is not None:
        return sample.experts_TLK
    return np.full((len(sample.token_ids), *shape), ANY_EXPERT, dtype=np.int16)
