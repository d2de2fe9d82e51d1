"""One rank of any trained model: its device and ranks, its version, its saved state."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel

from grmpipe.config.train import TrainConfig
from grmpipe.models.freed_memory import keep_freed_memory
from grmpipe.models.lm.checkpoint import ShardedSave, load_sharded
from grmpipe.models.lm.parallel.ranks import choose_device, join_ranks
from grmpipe.models.stored_files import StoredFile
from grmpipe.train.non_finite_gradients import NonFiniteGradients
from grmpipe.train.optimizer import WaitingMoments, make_optimizer, schedule_lr, update
from grmpipe.types import Metrics


class TrainingRank(ABC):
    """A rank. Its methods are collectives: all ranks call the same ones in the same order."""

    own_errors: ClassVar = (NonFiniteGradients,)
    _model: PreTrainedModel
    _optimizer: Optimizer
    _moments: WaitingMoments

    def __init__(
        self, device: str, rank: int, world_size: int, init_method: str | None, train: TrainConfig, updates: int
    ) -> None:
        """device: "cpu" or "cuda"; empty: chosen by torch. updates: optimizer steps in each of train.num_steps."""
        self._train = train
        self._updates_per_batch = updates
        self._device = choose_device(device, rank)
        if self._device.type == "cpu":
            torch.set_num_threads(1)  # several learners and engines share the cores
            keep_freed_memory()
        else:
            torch.cuda.set_device(self._device)
        self._meshes = join_ranks(rank, world_size, init_method, self._device, train.parallel)
        self._world_size = world_size
        self._save = ShardedSave()
        self._version = 0

    @property
    def version(self) -> int:
        """Completed optimizer steps."""
        return self._version

    @abstractmethod
    def discard(self) -> None:
        """Drop the open batch."""

    def _begin_training(self, model: PreTrainedModel) -> None:
        """Set the model, and make the optimizer of what it trains."""
        self._model = model
        self._optimizer = make_optimizer(model, self._train)
        self._moments = WaitingMoments(self._optimizer, offload=self._train.optimizer.offload)

    def _step(self, denominator: float) -> Metrics:
        """An optimizer step on the accumulated gradients, a sum over ranks, divided by this.

        Raises NonFiniteGradients, on all ranks.
        """
        factor = self._world_size / denominator  # FSDP2 averages over ranks; a batch's loss is a sum over them
        rate = schedule_lr(self._version / self._updates_per_batch, self._train)
        with self._moments.on_device():
            metrics = update(self._model, self._optimizer, factor, rate, self._train.max_grad_norm)
        self._version += 1
        return metrics

    def save(self, directory: str) -> None:
        """Model, optimizer and version, for `load` on any number of ranks."""
        self._begin_save(directory, in_background=False)

    def begin_save(self, directory: str) -> None:
        """Like save, from a copy in host memory: training may continue when this returns."""
        self._begin_save(directory, in_background=True)

    def _begin_save(self, directory: str, *, in_background: bool) -> None:
        with self._moments.on_device():
            self._save.begin(directory, self._model, self._optimizer, self._version, in_background=in_background)

    def saved(self) -> tuple[StoredFile, ...] | None:
        """The files that this rank wrote. None while it is writing."""
        return self._save.files()

    def load(self, directory: str) -> int:
        """Load a saved state; returns its version."""
        self.discard()
        with self._moments.on_device():
            self._version = load_sharded(directory, self._model, self._optimizer)
        return self._version
