"""Steps back towards the weights that training started from, so that the same data can be trained on often.

Knows no batch and no loss: the time of a reset is a function of the version, its strength is one number.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Reset:
    """Resets weights: theta <- (1 - share) theta + share theta_0, and clears the optimizer's moments.

    Shrink and perturb (arXiv 1910.08475) with the initial weights instead of random ones: the reset of LoRR (arXiv
    2508.06412), which replays often. Each rank keeps its shard of theta_0 on the host. Checkpoints leave it out: the
    model's files have it.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        """model: as loaded, before any training."""
        self._share = share
        self._initial = [shard.detach().to("cpu", copy=True) for shard in learning_shards(model)]

    @torch.no_grad()
    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for shard, initial in zip(learning_shards(model), self._initial, strict=True):
            shard.lerp_(initial.to(shard.device), self._share)
        for state in optimizer.state.values():  # zeros, not deletion: a checkpoint stores them as they are
            for value in state.values():
                value.zero_()


@torch.no_grad()
def learning_shards(model: nn.Module) -> Iterator[Tensor]:
    """This rank's part of each trained parameter, sharing its storage."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            yield parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def reset_is_due(version: int, every: int, last_version: int) -> bool:
    """Whether to reset after the batch that made `version`. Not after the last one: nothing would be learned again."""
    return every > 0 and version % every == 0 and version < last_version
