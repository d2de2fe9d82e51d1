"""Steps back towards the weights that training started from, so that the same data can be trained on often.

Knows no batch and no loss: when is a function of the version, how far is one number.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Reset:
    """theta <- (1 - share) theta + share theta_0, and the optimizer forgets its moments.

    Shrink and perturb (arXiv 1910.08475) with the initial weights in the place of random ones: the reset of LoRR (arXiv
    2508.06412), which replays much. theta_0 is kept on the host, each rank its own shard: in no checkpoint, for it is
    what the model's files say.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        """Of a model as it was loaded."""
        self._share = share
        self._initial = [shard.detach().to("cpu", copy=True) for shard in learning_shards(model)]

    @torch.no_grad()
    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for shard, initial in zip(learning_shards(model), self._initial, strict=True):
            shard.lerp_(initial.to(shard.device), self._share)
        for state in optimizer.state.values():  # zeros rather than nothing: a checkpoint holds them as they are
            for value in state.values():
                value.zero_()


@torch.no_grad()
def learning_shards(model: nn.Module) -> Iterator[Tensor]:
    """What this rank holds of each parameter that learns. They share its storage."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            yield parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def reset_is_due(version: int, every: int, last_version: int) -> bool:
    """After the batch that made `version`; not after the last one: nothing would learn again what is lost."""
    return every > 0 and version % every == 0 and version < last_version
