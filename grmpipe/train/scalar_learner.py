"""Trains a model with a scalar head, on one rank: gradients of batches, optimizer steps, files out. Knows no judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from grmpipe.train.scalar_batch import ScalarBatch
from grmpipe.train.settings import TrainConfig
from grmpipe.train.update import make_optimizer, update
from grmpipe.types import Metrics
from models.checkpoint import export_hf
from models.parallelize import SCALAR_HEAD, choose_device, join_ranks, load_parallel, without_gradient
from models.scalar_head import packed_scores

ScalarLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (scores_T, targets_T, weights_T) -> the sum over tokens


def summed_bce(scores_T: Tensor, targets_T: Tensor, weights_T: Tensor) -> Tensor:
    """Binary cross-entropy of the targets (0 or 1) under sigmoid(score)."""
    return F.binary_cross_entropy_with_logits(scores_T, targets_T, weights_T, reduction="sum")


SCALAR_LOSSES: dict[str, ScalarLoss] = {"bce": summed_bce}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarLearnerSpec:
    """All that a rank needs to build its learner.

    model_path: a causal language model, which gets a new head, or a model that has one.
    tokenizer_path: of the directory that the export gets its tokenizer from.
    """

    model_path: str
    tokenizer_path: str
    train: TrainConfig
    loss: str = "bce"  # a row of SCALAR_LOSSES
    device: str = ""  # "cpu" or "cuda"; empty: what torch finds
    master_dtype: str = "float32"


class ScalarLearner:
    """One rank. Its methods are collectives: all ranks call the same ones in the same order."""

    def __init__(
        self, spec: ScalarLearnerSpec, rank: int = 0, world_size: int = 1, init_method: str | None = None
    ) -> None:
        self._spec = spec
        self._device = choose_device(spec.device, rank)
        if self._device.type == "cpu":
            torch.set_num_threads(1)  # learners and engines share the cores
        else:
            torch.cuda.set_device(self._device)
        mesh = join_ranks(rank, world_size, init_method, self._device)
        self._world_size = world_size
        train = spec.train
        self._model = load_parallel(
            spec.model_path,
            mesh,
            self._device,
            spec.master_dtype,
            train.dtype,
            train.activation_checkpointing,
            SCALAR_HEAD,
        )
        self._optimizer = make_optimizer(self._model, train)
        self._loss = SCALAR_LOSSES[spec.loss]
        self._sums_2 = self._no_sums()  # of the open batch: loss, weight
        self._version = 0

    def accumulate(self, batch: ScalarBatch) -> None:
        """Add the gradient of this batch's summed loss."""
        targets_T, weights_T = self._here(batch.targets_T), self._here(batch.weights_T)
        loss = self._loss(self._forward(batch), targets_T, weights_T)
        loss.backward()
        self._sums_2 += torch.stack([loss.detach(), weights_T.sum()])

    def step(self) -> Metrics:
        """Divide what was accumulated by its weight over all ranks, clip, update.

        Raises NonFiniteGradients, on all ranks, with the batch discarded.
        """
        dist.all_reduce(self._sums_2)
        loss, weight = self._sums_2.tolist()
        assert weight > 0, "a step has something to learn from"
        try:  # FSDP2 averages over ranks; a batch's loss is a sum over them
            told = update(self._model, self._optimizer, self._world_size / weight, self._version, self._spec.train)
        finally:
            self._optimizer.zero_grad()
            self._sums_2 = self._no_sums()
        self._version += 1
        return {"train/loss": loss / weight, **told}

    def scores(self, batch: ScalarBatch) -> np.ndarray:
        """[T] float32: what the head says at each token."""
        with without_gradient(self._model):
            return self._forward(batch).float().cpu().numpy()

    def export(self, directory: str) -> None:
        """A Hugging Face directory that a scorer can serve."""
        export_hf(directory, self._model, self._spec.tokenizer_path)

    def _forward(self, batch: ScalarBatch) -> Tensor:
        return packed_scores(
            self._model,
            self._here(batch.token_ids_T),
            self._here(batch.position_ids_T),
            self._here(batch.sequence_lengths_S),
        )

    def _here(self, array: np.ndarray) -> Tensor:
        return torch.tensor(array, device=self._device)  # copies: arrays out of an object store are read-only

    def _no_sums(self) -> Tensor:
        return torch.zeros(2, device=self._device)
