"""One rank of any trained model: its device and ranks, its version, its saved state; a step on its sharded model."""

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from transformers import PreTrainedModel

from grmpipe.config.train import LAYERS, TrainConfig
from grmpipe.models.lm.checkpoint import ShardedSave, load_sharded
from grmpipe.models.lm.offloaded_memory import OffloadedMemory
from grmpipe.models.lm.parallel.ranks import choose_device, join_ranks
from grmpipe.models.lm.parallelize import compile_layers
from grmpipe.models.stored_files import StoredFile
from grmpipe.train.non_finite_gradients import NonFiniteGradients
from grmpipe.types import Metrics


def make_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of the trained parameters: frozen ones have no moments."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (train.optimizer.betas[0], train.optimizer.betas[1])
    return torch.optim.AdamW(learning, lr=train.lr, betas=betas, weight_decay=train.optimizer.weight_decay, fused=True)


class WaitingMoments:
    """The optimizer's moments, which wait on the host between steps if `offload` says so."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, offload: bool) -> None:
        self._optimizer = optimizer
        self._offloads = offload
        self._waiting = OffloadedMemory()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context: moments are where the optimizer, a checkpoint or a reset can read and write them."""
        self._waiting.load_back()
        try:
            yield
        finally:
            if self._offloads:
                self._waiting.offload(iterate_moments(self._optimizer))


def iterate_moments(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors of its state but the number of steps."""
    for state in optimizer.state.values():
        yield from (value for name, value in state.items() if name != "step")


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, factor: float, rate: float, max_grad_norm: float
) -> Metrics:
    """Multiply the gradients by `factor`, clip them, make a step at this learning rate. A collective.

    Raises NonFiniteGradients, on all ranks, without a step.
    """
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    norm = _clip(model, max_grad_norm)
    if not math.isfinite(norm):
        raise NonFiniteGradients(norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return {"train/grad_norm": norm, "train/lr": rate}


def _clip(model: nn.Module, max_norm: float) -> float:
    """Clip all gradients to this norm; returns what it was. A collective.

    Norms are taken per mesh, because torch can't add up tensors of different meshes: divided experts have their own.
    """
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if (gradient := parameter.grad) is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [_whole(get_total_norm([p.grad for p in some if p.grad is not None])) for some in by_mesh.values()]
    total = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    for some in by_mesh.values():
        clip_grads_with_norm_(some, max_norm, total)
    return total.item()


def _whole(norm: Tensor) -> Tensor:
    """One dimension of the mesh after another: torch would do the same, and warn."""
    if not isinstance(norm, DTensor):
        return norm
    for dimension in range(norm.device_mesh.ndim):
        placements = [*norm.placements]
        placements[dimension] = Replicate()
        norm = norm.redistribute(placements=placements)
    return norm.to_local()


DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def schedule_lr(step: float, config: TrainConfig) -> float:
    """The rate after `step` of num_steps steps: linear warm-up, then the decay over the rest of the run.

    With several optimizer steps per batch each counts as a fraction: the second of four on the first batch is made at
    0.25. The rate is 0 at neither end: such a step would cost time and learn nothing.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    progress = (step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps)
    return config.lr * DECAYS[config.schedule](min(progress, 1.0))


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
        self._uncompiled = compile_layers(model, self._device) if self._train.compile == LAYERS else ""

    def list_uncompiled(self) -> str:
        """What isn't compiled though train.compile asks for it, and why; empty: nothing."""
        return self._uncompiled

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


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
KEPT_BYTES = 256 << 20
LARGEST_BYTES = 32 << 20  # in a tensor; glibc takes no more


def keep_freed_memory() -> None:
    """Let the process keep up to KEPT_BYTES of freed memory. A training step frees all its activations: given back to
    the system, they cost a page fault for each 4 KiB when the next step needs them. No effect without glibc.
    """
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, LARGEST_BYTES)
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
