"""Trains a model with a scalar head to classify, on one rank: gradients of batches, optimizer steps. Knows no judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from grmpipe.train.scalar.scalar_batch import ScalarBatch
from grmpipe.train.scalar.scalar_rank import ScalarRank, ScalarSpec
from grmpipe.types import Metrics

ScalarLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (scores_T, targets_T, weights_T) -> the sum over tokens


def summed_bce(scores_T: Tensor, targets_T: Tensor, weights_T: Tensor) -> Tensor:
    """Binary cross-entropy of the targets (0 or 1) under sigmoid(score)."""
    return F.binary_cross_entropy_with_logits(scores_T, targets_T, weights_T, reduction="sum")


SCALAR_LOSSES: dict[str, ScalarLoss] = {"bce": summed_bce}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarLearnerSpec(ScalarSpec):
    """What a rank needs to build its learner."""

    loss: str = "bce"  # a row of SCALAR_LOSSES


class ScalarLearner(ScalarRank):
    """One rank of a scalar learner. Its methods are collectives: all ranks call the same ones in the same order."""

    def __init__(
        self, spec: ScalarLearnerSpec, rank: int = 0, world_size: int = 1, init_method: str | None = None
    ) -> None:
        super().__init__(spec, rank, world_size, init_method)
        self._loss = SCALAR_LOSSES[spec.loss]

    def accumulate(self, batch: ScalarBatch) -> None:
        """Add the gradient of this batch's summed loss."""
        targets_T, weights_T = self._here(batch.targets_T), self._here(batch.weights_T)
        loss = self._loss(self._forward(batch), targets_T, weights_T)
        loss.backward()
        self._count(loss=loss, weight=weights_T.sum())

    def step(self) -> Metrics:
        """Divide the accumulated gradients by the weight of all ranks, clip, update.

        Raises NonFiniteGradients, on all ranks, with the batch discarded.
        """
        means, update_metrics = self._update()
        return {"train/loss": means["loss"], **update_metrics}
