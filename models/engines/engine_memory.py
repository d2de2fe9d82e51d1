"""The memory of an engine on a device: what it holds by its options, and what it can free. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

# The embedded engine's packed copies of weights, in bytes: of each from the least on, and at most so many.
LEAST_PACKED, MOST_PACKED = 1 << 20, 1 << 30
WIDE_CACHES = ("auto", "bfloat16", "float16", "half", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
    """The bytes that an engine reserves for keys and values on one device, and what decides them, in words."""

    num_bytes: float
    decided_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """The defaults are those of an engine that keeps its memory, and of which no more is known.

    frees_gpu:       it can free a GPU's memory while others need it, if it is started for that (EngineSpec.sleeps).
    frees_cache:     it can free its keys and values, on any device.
    grows_cache:     its keys and values grow with its rows, by copying; otherwise it reserves fixed memory for them.
    bytes_in_layers: per weight of a linear layer, if it holds them in fewer than its dtype has.
    share_option:    the option of `engine.<section>` that holds its share of a GPU's memory.
    share:           the share of a whole GPU that its options ask for; None: not set, or it has no such option.
    lone_share:      its share of a GPU that it has alone, weights included; None: unknown.
    shares_leftover: on a shared GPU it takes what the others leave.
    share_has_activations: the share also holds what it computes with, so less is left for keys and values.
    cache_option:    the option that holds the bytes for keys and values, if it has one.
    cache_bytes:     by this option; None: not set.
    cpu_cache_bytes: on a CPU, if the option isn't set.
    most_packed:     on a CPU, the most bytes of float32 weights that it holds a second time, arranged for products.
    remedy:          what to type if it has a slot alone that is too small.
    """

    section: str = ""
    frees_gpu: bool = False
    frees_cache: bool = False
    grows_cache: bool = False
    bytes_in_layers: int | None = None
    share_option: str = ""
    share: float | None = None
    lone_share: float | None = None
    shares_leftover: bool = False
    share_has_activations: bool = False
    cache_option: str = ""
    cache_bytes: float | None = None
    cpu_cache_bytes: float | None = None
    most_packed: int = 0
    remedy: str = "take larger slots, or raise slots_per_replica"

    def frees_device(self, device: str) -> bool:
        """Whether it can free a device's memory, including the weights."""
        return self.frees_gpu and device == "cuda"

    def sleeps(self, device: str) -> bool:
        """Whether it can free some memory while others need it."""
        return self.frees_cache or self.frees_device(device)

    def cache_room(self, weight_bytes: float, device: str, device_bytes: float | None) -> CacheRoom | None:
        """What it reserves for keys and values on a device that holds `weight_bytes` of weights, and of activations
        where they are part of its share; None: unknown.
        """
        num_bytes = self.cache_bytes or (self.cpu_cache_bytes if device == "cpu" else None)
        if num_bytes is not None:
            return CacheRoom(num_bytes=num_bytes, decided_by=f"engine.{self.section}.{self.cache_option}")
        if device == "cpu" or device_bytes is None or self.lone_share is None:
            return None
        decided_by = f"the rest of engine.{self.section}.{self.share_option}={self.lone_share:g}"
        return CacheRoom(num_bytes=max(0.0, self.lone_share * device_bytes - weight_bytes), decided_by=decided_by)


def are_coarse(options: Mapping[str, object]) -> bool:
    """Whether these arguments of a library make weights or cache coarser than what an engine is sent."""
    named = {name.replace("-", "_"): value for name, value in options.items()}
    return bool(named.get("quantization")) or named.get("kv_cache_dtype", "auto") not in WIDE_CACHES
