"""The critic's training data: sequences with values and returns, packed in rounds. Pure: knows no model.

The head's output at token t is about the next token: the value of the state in which that token is sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grmpipe.train.batching.samples import split_rollout, with_inserted
from grmpipe.train.batching.seqlen_balancing import Load, deal, fill
from grmpipe.train.scalar.scalar_batch import NOTHING, PackedSequences, measure_loads, pack_sequences
from grmpipe.types import Rollout, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSample:
    """A sequence of tokens. Entry t belongs to token_ids[t]: the value before it was sampled, and the return from it
    on.

    loss_mask: 1 on sampled tokens except the first token of the sequence: there is no state before it to value.
    """

    group_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    values: tuple[float, ...]
    returns: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueBatch(PackedSequences):
    """Sequences with the head's targets. Entry t is the target at token t."""

    values_T: np.ndarray  # float32, of the critic that started the batch
    returns_T: np.ndarray  # float32
    weights_T: np.ndarray  # float32, 0 for tokens without a target


ValueRound = tuple[ValueBatch, ...]  # one per rank
SequenceRound = tuple[PackedSequences, ...]


# -- requests ----------------------------------------------------------------------------------------------------------


def make_sequences(rollout: Rollout) -> tuple[TrainingSample, ...]:
    """The segments of a rollout, as they are trained."""
    return split_rollout(rollout, np.zeros(rollout.num_sampled_tokens))


def values_of_samples(
    samples: Sequence[TrainingSample], scores: Sequence[np.ndarray]
) -> dict[tuple[str, int], np.ndarray]:
    """(group_id, sibling) -> values, from the head's output at each token of each sample, in the order of segments. A
    first token has no state before it: 0.
    """
    found: dict[tuple[str, int], list[np.ndarray]] = {}
    for sample, scores_T in zip(samples, scores, strict=True):
        before_T = np.concatenate([[0.0], scores_T[:-1].astype(np.float64)])
        found.setdefault((sample.group_id, sample.sibling), []).append(before_T[sample.of_completions()])
    return {key: np.concatenate(by_segment) for key, by_segment in found.items()}


# -- learning ----------------------------------------------------------------------------------------------------------


def value_samples(rollout: Rollout, values_N: np.ndarray, returns_N: np.ndarray) -> list[ValueSample]:
    """Samples of each segment, with values and returns assigned to their tokens."""
    by_values, by_returns = (split_rollout(rollout, with_inserted(rollout, each)) for each in (values_N, returns_N))
    return [
        ValueSample(
            group_id=rollout.group_id,
            token_ids=valued.token_ids,
            loss_mask=(0, *valued.loss_mask[1:]),
            values=valued.advantages,
            returns=returned.advantages,
        )
        for valued, returned in zip(by_values, by_returns, strict=True)
    ]


def pack_values(samples: Sequence[ValueSample]) -> ValueBatch:
    """Pack samples end to end. Targets of a token are placed one token earlier, where the head predicts them."""
    packed = pack_sequences([sample.token_ids for sample in samples])
    return ValueBatch(
        token_ids_T=packed.token_ids_T,
        position_ids_T=packed.position_ids_T,
        sequence_lengths_S=packed.sequence_lengths_S,
        values_T=_one_before([sample.values for sample in samples]),
        returns_T=_one_before([sample.returns for sample in samples]),
        weights_T=_one_before([sample.loss_mask for sample in samples]),
    )


def _one_before(columns: Sequence[Sequence[float]]) -> np.ndarray:
    """The entries of each sample shifted one token earlier, with 0 at the last token. [T] float32."""
    shifted = [np.asarray([*column[1:], 0.0], dtype=np.float32) for column in columns]
    return np.concatenate(shifted) if shifted else np.zeros(len(NOTHING), dtype=np.float32)


class ValuePacker:
    """Collects samples until every rank has a batch's worth; all ranks take part in every round.

    max_tokens: packed tokens per batch. A longer sample gets its own batch.
    """

    def __init__(self, max_tokens: int, world_size: int) -> None:
        self._max_tokens = max_tokens
        self._world_size = world_size
        self._waiting: list[ValueSample] = []

    def add(self, samples: Sequence[ValueSample]) -> list[ValueRound]:
        """Add samples; return the rounds that are full."""
        self._waiting += samples
        rounds = []
        while sum(len(sample.token_ids) for sample in self._waiting) >= self._max_tokens * self._world_size:
            by_rank, left_over = fill(self._loads(), self._max_tokens, self._world_size)
            rounds.append(self._packed(by_rank))
            self._waiting = [self._waiting[place] for place in sorted(left_over)]
        return rounds

    def flush(self) -> list[ValueRound]:
        """Return the remaining samples in rounds."""
        rounds = [self._packed(by_rank) for by_rank in deal(self._loads(), self._max_tokens, self._world_size)]
        self.discard()
        return rounds

    def discard(self) -> None:
        self._waiting = []

    def _loads(self) -> list[Load]:
        return measure_loads([len(sample.token_ids) for sample in self._waiting])

    def _packed(self, by_rank: Sequence[Sequence[int]]) -> ValueRound:
        return tuple(pack_values([self._waiting[place] for place in places]) for places in by_rank)
