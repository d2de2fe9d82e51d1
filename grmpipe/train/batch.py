"""The open batch on the driver: judged groups in, gradients as they come, one optimizer step (or a few) out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grmpipe.train.learner_group import LearnerGroup
from grmpipe.train.packer import Packer, Round
from grmpipe.train.samples import count, to_samples
from grmpipe.train.settings import AlgorithmConfig, TrainConfig
from grmpipe.types import JudgedGroup, Metrics, TrainingSample


class BatchTrainer:
    """Consumes groups, produces steps. Waits for nothing but the learner.

    With one update per batch, micro-batches are trained while the rest of the batch still rolls out (the early start):
    every estimator here needs only its own group. With several, the batch is kept and split, and pi_old is fixed first.
    """

    def __init__(self, learner: LearnerGroup, train: TrainConfig, algorithm: AlgorithmConfig) -> None:
        self._learner = learner
        self._algorithm = algorithm
        self._max_tokens = train.micro_batch_tokens
        self._packer = Packer(self._max_tokens, learner.size)
        self._samples: list[TrainingSample] = []
        self._groups: list[JudgedGroup] = []

    @property
    def starts_early(self) -> bool:
        return self._algorithm.updates_per_batch == 1

    async def take(self, group: JudgedGroup) -> None:
        samples = to_samples(group, self._algorithm)
        self._groups.append(group)
        self._samples += samples
        if self.starts_early:
            for round_ in self._packer.add(samples):
                await self._learner.accumulate(round_)

    async def step(self) -> Metrics:
        """End the batch. The open batch is empty afterwards, also where the learner refused it."""
        groups, samples = self._groups, self._samples
        try:
            if self.starts_early:
                for round_ in self._packer.flush():
                    await self._learner.accumulate(round_)
                return await self._learner.step(count(samples, min(group.version for group in groups)))
            return await self._several_updates(groups, samples)
        finally:
            self._forget()

    async def discard(self) -> None:
        """Drop the open batch: gradients, samples and all."""
        self._packer.discard()
        self._forget()
        await self._learner.discard()

    def _forget(self) -> None:
        self._groups, self._samples = [], []

    async def _several_updates(self, groups: Sequence[JudgedGroup], samples: Sequence[TrainingSample]) -> Metrics:
        """Split by groups, in order; the metrics are the last update's."""
        oldest = min(group.version for group in groups)
        parts = [self._part(samples, ids) for ids in split_ids(groups, self._algorithm.updates_per_batch)]
        packed = [self._pack(part) for part in parts]
        old = [[await self._learner.logprobs(round_) for round_ in rounds] for rounds in packed]
        metrics: Metrics = {}
        for part, rounds, olds in zip(parts, packed, old, strict=True):
            for round_, old_logprobs in zip(rounds, olds, strict=True):
                await self._learner.accumulate(round_, old_logprobs)
            metrics = await self._learner.step(count(part, oldest))
        return metrics

    def _part(self, samples: Sequence[TrainingSample], group_ids: set[str]) -> list[TrainingSample]:
        return [sample for sample in samples if sample.group_id in group_ids]

    def _pack(self, samples: Sequence[TrainingSample]) -> list[Round]:
        packer = Packer(self._max_tokens, self._learner.size)
        return packer.add(samples) + packer.flush()


def split_ids(groups: Sequence[JudgedGroup], parts: int) -> list[set[str]]:
    """Group ids in `parts` nearly equal parts, none of them empty."""
    ids = np.array([group.group_id for group in groups])
    return [set(part.tolist()) for part in np.array_split(ids, min(parts, len(ids)))]
