"""What a batch takes of the device of a rank: operations, memory, utilisation."""

import logging

import numpy as np
import torch

from grmpipe.models.lm.flops import ModelFlops, PackedSizes
from grmpipe.scheduler.devices import DEVICES, GB, device_called
from grmpipe.train.learner.rank_metrics import FLOPS, OF_RANK, PEAK_FLOPS
from grmpipe.types import Metrics, MicroBatch

log = logging.getLogger(__name__)


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
