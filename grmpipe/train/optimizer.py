"""An optimizer step on a sharded model: divides, checks and clips gradients, sets the learning rate; where its moments
wait between steps.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from grmpipe.config.train import TrainConfig
from grmpipe.models.lm.offloaded_memory import OffloadedMemory
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
