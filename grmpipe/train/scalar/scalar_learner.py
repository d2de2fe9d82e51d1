"""Trains a model with a scalar head to classify, on one rank: gradients of batches, optimizer steps."""

import torch.nn.functional as F

from grmpipe.train.scalar.scalar_batch import ScalarBatch
from grmpipe.train.scalar.scalar_rank import ScalarRank
from grmpipe.types import Metrics


class ScalarLearner(ScalarRank):
    """One rank of a scalar learner. Its methods are collectives: all ranks call the same ones in the same order."""

    def accumulate(self, batch: ScalarBatch) -> None:
        """Add the gradient of this batch's summed loss: binary cross-entropy of the targets (0 or 1) under
        sigmoid(score).
        """
        targets_T, weights_T = self._here(batch.targets_T), self._here(batch.weights_T)
        loss = F.binary_cross_entropy_with_logits(self._forward(batch), targets_T, weights_T, reduction="sum")
        loss.backward()
        self._count(loss=loss, weight=weights_T.sum())

    def step(self) -> Metrics:
        """Divide the accumulated gradients by the weight of all ranks, clip, update.

        Raises NonFiniteGradients, on all ranks, with the batch discarded.
        """
        means, update_metrics = self._update()
        return {"train/loss": means["loss"], **update_metrics}
