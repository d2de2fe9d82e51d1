"""Usage of a rank's device: operations by hand, a GPU's numbers by a double, and all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from grmpipe.models.lm.flops import FULL, ModelFlops
from grmpipe.train.learner.batch_metrics import DeviceUsage, peak_flops
from grmpipe.train.ranks import over_ranks
from grmpipe.types import MicroBatch

CPU = torch.device("cpu")
MODEL = ModelFlops(layer_weights=1000, head_weights=100, attention={FULL: 10})


def micro_batch(lengths: Sequence[int], trained: Sequence[int]) -> MicroBatch:
    """Samples of these lengths; `trained`: the packed tokens that their entries train."""
    num_tokens = sum(lengths)
    mask = np.zeros(num_tokens, dtype=np.float32)
    mask[list(trained)] = 1
    zeros = np.zeros(num_tokens, dtype=np.float32)
    return MicroBatch(
        token_ids_T=np.arange(num_tokens),
        position_ids_T=np.concatenate([np.arange(length) for length in lengths]),
        sample_lengths_S=np.array(lengths),
        parents_S=np.arange(len(lengths)),
        prefix_lengths_S=np.zeros(len(lengths), dtype=np.int64),
        places_E=np.arange(num_tokens),
        rollout_lengths_R=np.array(lengths),
        loss_mask_E=mask,
        sampler_logprobs_E=zeros,
        advantages_E=zeros,
        versions_E=np.zeros(num_tokens, dtype=np.int32),
    )


def test_a_pass_counts_the_layers_for_all_tokens_and_the_head_for_trained_ones() -> None:
    usage = DeviceUsage(MODEL, CPU, "float32")
    usage.add(micro_batch([3, 2], [1, 2, 4]), gradients=True)
    forward = 2 * (5 * 1000 + 3 * 100) + (6 + 3) * 10
    assert usage.read() == {"rank/model_flops": 3 * forward}
    usage.add(micro_batch([3, 2], [1, 2, 4]), gradients=False)
    assert usage.read() == {"rank/model_flops": 4 * forward}
    usage.reset()
    assert usage.read() == {"rank/model_flops": 0.0}


def test_ranks_that_share_a_sample_count_it_once_together() -> None:
    whole, parts = DeviceUsage(MODEL, CPU, "float32"), [DeviceUsage(MODEL, CPU, "float32", cp=2) for _ in range(2)]
    for usage in (whole, *parts):
        usage.add(micro_batch([3, 2], [1, 2, 4]), gradients=True)
    assert sum(usage.read()["rank/model_flops"] for usage in parts) == whole.read()["rank/model_flops"]


def test_a_token_that_several_samples_train_passes_the_head_once() -> None:
    shared = micro_batch([4], [1, 2])
    usage, twice = DeviceUsage(MODEL, CPU, "float32"), DeviceUsage(MODEL, CPU, "float32")
    usage.add(shared, gradients=True)
    twice.add(replace(shared, places_E=np.array([1, 2, 1, 2]), loss_mask_E=np.ones(4, np.float32)), gradients=True)
    assert usage.read() == twice.read()


def test_ranks_that_share_samples_count_a_part_each() -> None:
    alone, shared = DeviceUsage(MODEL, CPU, "float32"), DeviceUsage(MODEL, CPU, "float32", cp=2)
    for usage in (alone, shared):
        usage.add(micro_batch([4], [1, 2]), gradients=True)
    assert 2 * shared.read()["rank/model_flops"] == alone.read()["rank/model_flops"] > 0


def test_the_pass_of_an_idle_rank_is_no_work() -> None:
    usage = DeviceUsage(MODEL, CPU, "float32")
    usage.add(micro_batch([2], []), gradients=True)
    assert usage.read() == {"rank/model_flops": 0.0}


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [("NVIDIA H100 80GB HBM3", "bfloat16", 989e12), ("NVIDIA H100 80GB HBM3", "float32", 67e12),
     ("NVIDIA H100 NVL", "bfloat16", 835e12), ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
     ("NVIDIA B200", "bfloat16", 2250e12), ("NVIDIA GB200", "bfloat16", 2500e12), ("NVIDIA L40S", "bfloat16", 362e12),
     ("NVIDIA H20", "bfloat16", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
     ("AMD Instinct MI300X", "bfloat16", None)],
)  # fmt: skip
def test_only_known_gpus_have_a_peak(name: str, dtype: str, expected: float | None) -> None:
    assert peak_flops(name, dtype) == expected


class FakeGpu:
    """What torch says of a GPU; installed in place of torch.cuda's functions."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.name, self.utilizations = name, [90, 50]
        for function in (
            "get_device_name", "reset_peak_memory_stats", "mem_get_info", "max_memory_allocated", "max_memory_reserved",
            "utilization",
        ):  # fmt: skip
            patch.setattr(torch.cuda, function, getattr(self, function))

    def get_device_name(self, device: torch.device) -> str:
        return self.name

    def reset_peak_memory_stats(self, device: torch.device) -> None: ...

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 20_000_000_000, 80_000_000_000

    def max_memory_allocated(self, device: torch.device) -> int:
        return 30_000_000_000

    def max_memory_reserved(self, device: torch.device) -> int:
        return 40_000_000_000

    def utilization(self, device: torch.device) -> int:
        if not self.utilizations:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed or it can't be imported.")
        return self.utilizations.pop()


def test_a_gpu_reports_peaks_of_memory_and_its_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch, "NVIDIA H200")
    usage = DeviceUsage(MODEL, torch.device("cuda", 0), "bfloat16")
    assert usage.read() == {
        "rank/model_flops": 0.0, "rank/peak_flops_per_s": 989e12, "rank/max_memory_allocated_gb": 30.0,
        "rank/max_memory_reserved_gb": 40.0, "rank/device_memory_used_gb": 60.0, "rank/gpu_utilization": 0.5,
    }  # fmt: skip


def test_without_nvml_or_for_an_unknown_gpu_there_is_no_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeGpu(monkeypatch, "NVIDIA H20").utilizations.clear()
    usage = DeviceUsage(MODEL, torch.device("cuda", 0), "bfloat16")
    for _ in range(2):
        metrics = usage.read()
        assert "rank/gpu_utilization" not in metrics and "rank/peak_flops_per_s" not in metrics
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["no metric of the GPU's utilisation"]


def test_ranks_add_their_operations_and_show_the_largest_and_the_mean_memory() -> None:
    first = {
        "train/loss": 0.5,
        "rank/model_flops": 3.0,
        "rank/peak_flops_per_s": 9.0,
        "rank/max_memory_reserved_gb": 8.0,
    }
    second = {
        "train/loss": 0.5,
        "rank/model_flops": 5.0,
        "rank/peak_flops_per_s": 9.0,
        "rank/max_memory_reserved_gb": 2.0,
    }
    assert over_ranks([first, second]) == {
        "train/loss": 0.5, "perf/model_flops": 8.0, "perf/peak_flops_per_s": 18.0,
        "perf/max_memory_reserved_gb": 8.0, "perf/max_memory_reserved_gb_mean": 5.0,
    }  # fmt: skip


def test_there_is_no_peak_of_all_ranks_if_one_is_unknown() -> None:
    known = {"rank/model_flops": 3.0, "rank/peak_flops_per_s": 9.0}
    assert over_ranks([known, {"rank/model_flops": 3.0}]) == {"perf/model_flops": 6.0}
