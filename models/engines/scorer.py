"""Serves a model with a scalar head: sequences in, one number each. Batches its inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from grmpipe.models.lm.packed_check import probe_scores
from grmpipe.models.lm.scalar_head import (
    compute_packed_scores,
    find_padding,
    last_of_samples,
    load_scalar_head,
    without_padding,
)

Sequences = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """What a process needs to make its scorer; it is sent there.

    max_batch_tokens: packed tokens per forward pass. A longer sequence is passed alone.
    """

    path: str
    dtype: str = "float32"
    device: str = "cpu"
    max_batch_tokens: int = 16_384


class ScalarScorer:
    """A scorer: one model on one device. Calls block, and come one at a time.

    Each rank of a group makes one, with the whole model; they don't know each other.
    """

    def __init__(self, spec: ScorerSpec, rank: int = 0, world_size: int = 1, init_method: str | None = None) -> None:
        if spec.device == "cpu":
            torch.set_num_threads(1)  # engines and learners share the cores
        self._spec = spec
        self._model = load_scalar_head(spec.path, spec.dtype, spec.device)
        self._pad_id = find_padding(self._model.config)
        with torch.inference_mode():
            probe_scores(self._model, torch.device(spec.device), spec.dtype)

    def scores(self, sequences: Sequences) -> list[float]:
        """The head's number at the last token of each sequence, in order. A sequence classifier skips padding there."""
        sequences = [without_padding(sequence, self._pad_id) for sequence in sequences]
        found = [0.0] * len(sequences)
        for batch in batches([len(sequence) for sequence in sequences], self._spec.max_batch_tokens):
            for index, score in zip(batch, self._pass([sequences[index] for index in batch]), strict=True):
                found[index] = score
        return found

    @torch.inference_mode()
    def _pass(self, sequences: Sequences) -> list[float]:
        lengths_S = torch.tensor([len(sequence) for sequence in sequences])
        ids_T = torch.cat([torch.tensor(sequence) for sequence in sequences])
        positions_T = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        ids_T, positions_T = (x.to(self._spec.device) for x in (ids_T, positions_T))
        scores_T = compute_packed_scores(self._model, ids_T, positions_T, lengths_S)
        return last_of_samples(scores_T, lengths_S).tolist()


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of sequences that go through the model together: similar lengths, at most `max_tokens` in all."""
    batch: list[int] = []
    num_tokens = 0
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if batch and num_tokens + lengths[index] > max_tokens:
            yield batch
            batch, num_tokens = [], 0
        batch.append(index)
        num_tokens += lengths[index]
    if batch:
        yield batch
