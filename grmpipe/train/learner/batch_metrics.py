"""Metrics of a batch: over all micro-batches and ranks, and what it takes of the device of a rank."""

import logging

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grmpipe.algorithm.corrections import mismatch, mismatch_by_age
from grmpipe.algorithm.objective import SummedLoss
from grmpipe.models.lm.flops import ModelFlops, PackedSizes
from grmpipe.scheduler.devices import DEVICES, GB, device_called
from grmpipe.train.ranks import FLOPS, OF_RANK, PEAK_FLOPS
from grmpipe.types import BatchTotals, Metrics, MicroBatch

log = logging.getLogger(__name__)

# torch 2.11 has only the older name.
ALL_GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class BatchMetrics:
    """Sums on one rank; `read` adds them over the ranks. Used for one batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, float] = {}
        self._ratios_and_ages: list[Tensor] = []  # [N, 2] each

    def add(self, loss: SummedLoss, ages_N: Tensor) -> Metrics:
        """Add a micro-batch with the ages of its N trained tokens. Returns its sums on this rank."""
        named = {"loss": loss.total.detach(), **loss.sums}
        sums = dict(zip(named, torch.stack(list(named.values())).tolist(), strict=True))
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        ratios_N = loss.abs_log_ratios_N.detach()
        self._ratios_and_ages.append(torch.stack([ratios_N, ages_N.to(ratios_N.dtype)], dim=1))
        return {f"train/{name}_sum": value for name, value in sums.items()}

    def add_imitated(self, total: Tensor, nll: Tensor) -> None:
        """Add a micro-batch of demonstrations: its part of the loss, and its weighted negative log-likelihood."""
        for name, value in (("loss", total), ("sft_nll_nats", nll)):
            self._sums[name] = self._sums.get(name, 0.0) + value.item()

    def read(self, totals: BatchTotals, denominator: float, group: dist.ProcessGroup | None = None) -> Metrics:
        """Means over the batch: the loss as optimized, everything else per trained token; of demonstrations, per token
        of theirs. A collective.

        group: ranks that together have each sample once; None: all ranks.
        """
        names = sorted(self._sums)
        summed = torch.tensor([self._sums[name] for name in names], dtype=torch.float64, device=self._device)
        dist.all_reduce(summed, group=group)
        sums = dict(zip(names, summed.tolist(), strict=True))
        tokens = sums.pop("tokens")
        assert tokens == totals.num_loss_tokens, f"{tokens} tokens accumulated, {totals.num_loss_tokens} in the batch"
        loss = sums.pop("loss") / denominator
        imitated = {"train/sft_nll_nats": sums.pop("sft_nll_nats")} if "sft_nll_nats" in sums else {}
        means = {f"train/{name}": value / tokens for name, value in sums.items()}
        ratios_N, ages_N = _gather(torch.cat(self._ratios_and_ages), group).unbind(1)
        return {"train/loss": loss, **imitated, **means, **mismatch(ratios_N), **mismatch_by_age(ratios_N, ages_N)}


def _gather(rows_NC: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all ranks of a group, which may differ in number: padded with nan to the longest. Rows with a nan
    are dropped.
    """
    longest = torch.tensor(len(rows_NC), device=rows_NC.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    padded = rows_NC.new_full((int(longest), rows_NC.shape[1]), torch.nan)
    padded[: len(rows_NC)] = rows_NC
    everyone = padded.new_empty(dist.get_world_size(group) * len(padded), rows_NC.shape[1])
    ALL_GATHER(everyone, padded, group=group)
    return everyone[~everyone.isnan().any(dim=1)]


class DeviceUsage:
    """Usage by one rank since the last `reset`."""

    def __init__(self, flops: ModelFlops, device: torch.device, dtype: str, cp: int = 1) -> None:
        """cp: the ranks that share each sample: each computes an equal part of it."""
        self._model = flops
        self._cp = cp
        self._device = device
        self._peak_flops = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
        self._knows_utilization = True
        self._flops = 0.0
        self.reset()

    def reset(self) -> None:
        self._flops = 0.0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def add(self, micro_batch: MicroBatch, *, gradients: bool) -> None:
        """Count a pass over a micro-batch. That of an idle rank counts as nothing."""
        if micro_batch.loss_mask_E.any():
            sizes = measure_sizes(micro_batch)
            self._flops += (self._model.count_training(sizes) if gradients else self._model.forward(sizes)) / self._cp

    def read(self) -> Metrics:
        """Metrics of this rank; what its device doesn't report is left out."""
        metrics = {FLOPS: self._flops}
        if self._peak_flops is not None:
            metrics[PEAK_FLOPS] = self._peak_flops
        return metrics | (self._memory() | self._utilization() if self._device.type == "cuda" else {})

    def _memory(self) -> Metrics:
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            f"{OF_RANK}max_memory_allocated_gb": torch.cuda.max_memory_allocated(self._device) / GB,
            f"{OF_RANK}max_memory_reserved_gb": torch.cuda.max_memory_reserved(self._device) / GB,
            f"{OF_RANK}device_memory_used_gb": (total - free) / GB,
        }

    def _utilization(self) -> Metrics:
        """The share of the last second, or part of it, in which any kernel ran on the GPU."""
        if not self._knows_utilization:
            return {}
        try:
            return {f"{OF_RANK}gpu_utilization": torch.cuda.utilization(self._device) / 100}
        except Exception as error:  # NVML's own errors are of a package that may be missing
            self._knows_utilization = False
            log.warning("no metric of the GPU's utilisation: %s", error)
            return {}


def measure_sizes(micro_batch: MicroBatch) -> PackedSizes:
    rows = np.unique(micro_batch.places_E[micro_batch.loss_mask_E > 0])
    lengths, prefixes = micro_batch.sample_lengths_S.tolist(), micro_batch.prefix_lengths_S.tolist()
    return PackedSizes(lengths_S=lengths, prefixes_S=prefixes, head_rows=len(rows))


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak operations per second of a GPU that its driver calls so. None for an unknown one."""
    known = device_called(device_name)
    return None if known is None else DEVICES[known].flops(dtype)
