"""One rank of a model with a scalar head: the model, its optimizer, its files; and one that trains it to classify."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from grmpipe.config.train import TrainConfig
from grmpipe.models.hub import find_files
from grmpipe.models.lm.checkpoint import export_hf
from grmpipe.models.lm.device_copy import copy_to_device
from grmpipe.models.lm.packed_check import probe_scores
from grmpipe.models.lm.parallel.context_parallel import ContextRanks
from grmpipe.models.lm.parallelize import SCALAR_HEAD, load_parallel, without_gradient
from grmpipe.models.lm.scalar_head import compute_packed_scores
from grmpipe.models.settings import AUTO
from grmpipe.train.scalar.scalar_batch import PackedSequences, ScalarBatch
from grmpipe.train.training_rank import TrainingRank
from grmpipe.types import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarSpec:
    """What a rank needs to build its model.

    model_path: a causal language model, which gets a new head, or a model that has one.
    tokenizer_path: directory from which the export takes its tokenizer.
    updates_per_batch: optimizer steps in each of train.num_steps.
    """

    model_path: str
    tokenizer_path: str
    train: TrainConfig
    device: str = ""  # "cpu" or "cuda"; empty: chosen by torch
    master_dtype: str = "float32"
    updates_per_batch: int = 1


class ScalarRank(TrainingRank):
    def __init__(self, spec: ScalarSpec, rank: int = 0, world_size: int = 1, init_method: str | None = None) -> None:
        train = spec.train
        super().__init__(spec.device, rank, world_size, init_method, train, spec.updates_per_batch)
        self._context = ContextRanks.of(self._meshes.context)
        self._tokenizer_files = find_files(spec.tokenizer_path, weights=False)  # on this machine
        model = load_parallel(
            find_files(spec.model_path, weights=rank == 0),
            self._meshes,
            self._device,
            spec.master_dtype,
            train.dtype,
            train.activations,
            SCALAR_HEAD,
        )
        with without_gradient(model):
            probe_scores(model, self._device, train.dtype)
        self._begin_training(model)
        self._sums: dict[str, Tensor] = {}  # the open batch's, on this rank

    def scores(self, batch: PackedSequences) -> np.ndarray:
        """The head's output at each token, [T] float32."""
        with without_gradient(self._model):
            return self._forward(batch).float().cpu().numpy()

    def discard(self) -> None:
        """Drop the open batch."""
        self._optimizer.zero_grad()
        self._sums = {}

    def export(self, directory: str) -> None:
        """Export a Hugging Face directory that a scorer can serve."""
        train = self._train
        dtype = train.export_dtype or (train.dtype if train.dtype != AUTO else None)
        export_hf(directory, self._model, self._tokenizer_files, dtype=dtype, exact=SCALAR_HEAD.exact)

    def _forward(self, batch: PackedSequences) -> Tensor:
        ids_T, positions_T = copy_to_device([batch.token_ids_T, batch.position_ids_T], self._device)
        return compute_packed_scores(
            self._model, ids_T, positions_T, torch.tensor(batch.sequence_lengths_S), self._context
        )

    def _count(self, **sums: Tensor) -> None:
        """Add to the sums of the open batch."""
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value.detach()

    def _update(self) -> tuple[Metrics, Metrics]:
        """End the batch: a step on its gradients divided by its `weight` over all ranks. Returns the means of the other
        sums by name, and the metrics of the update.

        Raises NonFiniteGradients, on all ranks, with the batch discarded.
        """
        names = sorted(self._sums)
        added = torch.stack([self._sums[name].double() for name in names])
        dist.all_reduce(added, group=self._meshes.data_group)
        sums = dict(zip(names, added.tolist(), strict=True))
        weight = sums.pop("weight")
        assert weight > 0, "a step needs samples with weight"
        try:
            update_metrics = self._step(weight)
        finally:
            self.discard()
        return {name: value / weight for name, value in sums.items()}, update_metrics


class ScalarLearner(ScalarRank):
    """One rank of a scalar learner. Its methods are collectives: all ranks call the same ones in the same order."""

    def accumulate(self, batch: ScalarBatch) -> None:
        """Add the gradient of this batch's summed loss: binary cross-entropy of the targets (0 or 1) under
        sigmoid(score).
        """
        targets_T, weights_T = copy_to_device([batch.targets_T, batch.weights_T], self._device)
        loss = F.binary_cross_entropy_with_logits(self._forward(batch), targets_T, weights_T, reduction="sum")
        loss.backward()
        self._count(loss=loss, weight=weights_T.sum())

    def step(self) -> Metrics:
        """Divide the accumulated gradients by the weight of all ranks, clip, update.

        Raises NonFiniteGradients, on all ranks, with the batch discarded.
        """
        means, update_metrics = self._update()
        return {"train/loss": means["loss"], **update_metrics}
