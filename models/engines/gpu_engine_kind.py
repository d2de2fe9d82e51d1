"""What engine kinds for GPUs have in common: rows, sleep, quantization, memory for keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from models.engines.engine_kind import CacheRoom, EngineKind, EngineOptions

WIDE_CACHES = ("auto", "bfloat16", "float16", "half", "float32")


class GpuEngineOptions(EngineOptions, Protocol):
    """options: other arguments of the library."""

    @property
    def max_batch_rows(self) -> int: ...

    @property
    def sleep_mode(self) -> bool: ...

    @property
    def options(self) -> Mapping[str, object]: ...


Options = TypeVar("Options", bound=GpuEngineOptions, covariant=True)


class GpuEngineKind(EngineKind[Options]):
    """An engine kind that reserves a share of a GPU's memory for weights, keys and values: `share_option`."""

    tensor_parallel = True
    grammar = True
    frees_gpu = True

    @property
    def max_rows(self) -> int:
        return self.options.max_batch_rows

    @property
    def sleep_mode(self) -> bool:
        return self.options.sleep_mode

    @property
    def quantizes(self) -> bool:
        named = {name.replace("-", "_"): value for name, value in self.options.options.items()}
        return bool(named.get("quantization")) or named.get("kv_cache_dtype", "auto") not in WIDE_CACHES

    def rest_of_share(self, share: float, weight_bytes: float, device_bytes: float) -> CacheRoom:
        """The memory for keys and values, after the weights."""
        decided_by = f"the rest of engine.{self.section}.{self.share_option}={share:g}"
        return CacheRoom(num_bytes=max(0.0, share * device_bytes - weight_bytes), decided_by=decided_by)
