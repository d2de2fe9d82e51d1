"""Peak rates of devices: memory, bandwidth, arithmetic, links. Numbers only."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from grmpipe.models.bounds import Bounded, above, at_least

GB = 1e9


@dataclass(frozen=True)
class DeviceSpec(Bounded):
    """One slot, a GPU or a core, under a name for a pool's `device`. Rates are peaks in one direction."""

    memory_gb: float = above(0)  # Memory of the device.
    memory_gb_per_s: float = above(0)  # Bandwidth of its memory.
    tflops: dict[str, float] = field(default_factory=dict)  # [TFLOPS] Dense arithmetic by dtype, as {bfloat16: 989}.
    link_gb_per_s: float = above(0, 25.0)  # Bandwidth to its neighbours in the node.
    network_gb_per_s: float = above(0, 12.5)  # Bandwidth to other nodes, of each device.
    slots_per_node: int = at_least(1, 8)  # [slots] Devices of a node, which its links connect.
    host_gb_per_s: float = above(0, 25.0)  # Bandwidth to the memory of its machine.
    # The host's part of a decoding step: scheduling, sampling, launching.
    step_s: float = at_least(0, 0.004)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tflops or not all(rate > 0 for rate in self.tflops.values()):
            raise ValueError(f"tflops: dense TFLOPS by dtype, as in {{bfloat16: 989}}, got {self.tflops}")

    def flops(self, dtype: str) -> float:
        """Peak operations per second. An undeclared 16-bit type takes the value of the other; float32 never uses tensor
        cores, because torch multiplies in full precision by default. Raises ValueError for an unknown dtype.
        """
        sixteen = {"bfloat16", "float16"}
        for known in (dtype, *sorted(sixteen if dtype in sixteen else ())):
            if known in self.tflops:
                return self.tflops[known] * 1e12
        raise ValueError(f"tflops: no value for {dtype}; known: {', '.join(self.tflops)}")


# NVIDIA's data sheets: H100 (2024), H200 (2024), A100 (2022), L40S (2023), HGX B200 and GB200 NVL72 (2025). Dense
# figures: half of those "with sparsity"; fp8 where tensor cores have it (compute 8.9 and newer). NVLink and PCIe: half
# of a sheet's bandwidth, which counts both directions. Network: one adapter for each GPU, of 200 Gb/s in DGX A100, of
# 400 in those of H100 and H200 (as on the clusters of torchtitan's benchmarks), assumed for B200 and GB200; for PCIe
# cards assumed one of 200 Gb/s for two. The host's part of a decoding step: fitted (benchmarks/plan_rates.md). The core
# is one of an AMD EPYC: sgemm and a copy of 64 MB with torch 2.13; the network of its machine assumed 10 Gb/s.
DEVICES: Mapping[str, DeviceSpec] = {
    "h100": DeviceSpec(80, 3350, {"bfloat16": 989, "fp8": 1979, "float32": 67}, 450, 50, host_gb_per_s=64),
    "h100_pcie": DeviceSpec(80, 2000, {"bfloat16": 756, "fp8": 1513, "float32": 51}, 64, 12.5, host_gb_per_s=64),
    "h100_nvl": DeviceSpec(94, 3900, {"bfloat16": 835, "fp8": 1671, "float32": 60}, 300, 12.5, host_gb_per_s=64),
    "h200": DeviceSpec(141, 4800, {"bfloat16": 989, "fp8": 1979, "float32": 67}, 450, 50, host_gb_per_s=64),
    "a100_40": DeviceSpec(40, 1555, {"bfloat16": 312, "float32": 19.5}, 300, 25, host_gb_per_s=32),
    "a100_80": DeviceSpec(80, 2039, {"bfloat16": 312, "float32": 19.5}, 300, 25, host_gb_per_s=32),
    "l40s": DeviceSpec(48, 864, {"bfloat16": 362, "fp8": 733, "float32": 91.6}, 32, 12.5, host_gb_per_s=32),
    "b200": DeviceSpec(180, 8000, {"bfloat16": 2250, "fp8": 4500, "float32": 75}, 900, 50, host_gb_per_s=64),
    "gb200": DeviceSpec(186, 8000, {"bfloat16": 2500, "fp8": 5000, "float32": 80}, 900, 50, 72, host_gb_per_s=450),
    "cpu": DeviceSpec(
        4, 20, {"float32": 0.09, "bfloat16": 0.02}, 2, 1.25, 1024, host_gb_per_s=10, step_s=0.0005
    ),
}  # fmt: skip


def find_device(name: str, own: Mapping[str, DeviceSpec]) -> DeviceSpec:
    """A device by name, the user's own first. Raises ValueError with the nearest known name."""
    known = {**DEVICES, **own}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(
        f"unknown device {name!r}; {hint}known: {', '.join(known)}; "
        f"describe another with '+plan.devices={{{name}: {{memory_gb: .., memory_gb_per_s: .., "
        "tflops: {bfloat16: ..}}}'"
    )


def device_called(name: str) -> str | None:
    """The name in DEVICES for a GPU that its driver calls, for example, "NVIDIA H100 80GB HBM3". None if there is none,
    and for a part of a GPU (MIG), which has a part of its rates.
    """
    said = name.lower()
    if "mig" in said.split():
        return None
    for model, key in (("h200", "h200"), ("gb200", "gb200"), ("b200", "b200"), ("l40s", "l40s")):
        if model in said:
            return key
    if "h100" in said:
        return "h100_pcie" if "pcie" in said else "h100_nvl" if "nvl" in said else "h100"
    if "a100" in said:
        return "a100_80" if "80gb" in said else "a100_40"
    return None
