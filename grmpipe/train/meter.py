"""What a batch came to, over all micro-batches and ranks. Never changes a gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from grmpipe.train.corrections import mismatch
from grmpipe.train.objective import SummedLoss
from grmpipe.types import BatchTotals, Metrics


class Meter:
    """Sums on one rank; a read adds up the ranks. Used for one batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, float] = {}
        self._abs_log_ratios: list[Tensor] = []

    def add(self, loss: SummedLoss) -> Metrics:
        """Take in a micro-batch; returns its sums on this rank."""
        named = {"loss": loss.total.detach(), **loss.sums}
        sums = dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True))
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._abs_log_ratios.append(loss.abs_log_ratios_N.detach())
        return {f"train/{name}_sum": value for name, value in sums.items()}

    def read(self, totals: BatchTotals, denominator: float) -> Metrics:
        """Means over the batch: the loss as it was optimized, all else per trained token. A collective."""
        names = sorted(self._sums)
        summed = torch.tensor([self._sums[name] for name in names], dtype=torch.float64, device=self._device)
        dist.all_reduce(summed)
        sums = dict(zip(names, summed.tolist(), strict=True))
        tokens = sums.pop("tokens")
        assert tokens == totals.num_loss_tokens, f"{tokens} tokens accumulated, {totals.num_loss_tokens} in the batch"
        loss = sums.pop("loss") / denominator
        means = {f"train/{name}": value / tokens for name, value in sums.items()}
        return {"train/loss": loss, **means, **mismatch(_gather(torch.cat(self._abs_log_ratios)))}


def _gather(values_N: Tensor) -> Tensor:
    """The values of all ranks, whose numbers differ: padded with nan to the longest."""
    longest = torch.tensor(len(values_N), device=values_N.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = values_N.new_full((int(longest),), torch.nan)
    padded[: len(values_N)] = values_N
    everyone = padded.new_empty(dist.get_world_size() * len(padded))
    dist.all_gather_single(everyone, padded)
    return everyone[~everyone.isnan()]
