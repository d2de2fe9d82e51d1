"""SGLang's kind. Starts servers only if they aren't joined."""

from __future__ import annotations

from models.engines.engine_kind import CacheRoom, EngineSpec, OptionKey
from models.engines.gpu_engine_kind import GpuEngineKind
from models.engines.installed import nccl_version, sglang_missing
from models.settings import EngineConfig, ModelConfig, SglangConfig
from models.types import Engine


class SglangKind(GpuEngineKind[SglangConfig]):
    section = "sglang"
    transports = ("nccl", "gloo", "disk")
    share_option = "mem_fraction"
    memory_remedy = "lower engine.sglang.mem_fraction, or raise slots_per_replica"

    @classmethod
    def shared_options(cls, sections: EngineConfig) -> SglangConfig:
        return sections.sglang

    def make(self, spec: EngineSpec, rank: int) -> Engine:
        """Start a server, or join the running one of this replica."""
        from models.engines.sglang.sglang_engine import SglangEngine

        if self.joined:
            return SglangEngine.join(self.options.urls[rank], spec, self.options)
        return SglangEngine.start(spec, self.options)

    def check_installed(self, role: str, model: ModelConfig, key: OptionKey) -> None:
        if not self.joined and (missing := sglang_missing(self.options.python)):
            raise ValueError(missing if missing.startswith("engine.") else f"{role}.engine: {missing}")

    def nccl_version(self) -> str:
        return "" if self.joined else nccl_version(self.options.python)

    @property
    def joined(self) -> int:
        return len(self.options.urls)

    @property
    def memory_share(self) -> float | None:
        return None if self.joined else self.options.mem_fraction

    def cache_room(self, weight_bytes: float, device: str, device_bytes: float | None) -> CacheRoom | None:
        if device_bytes is None or device == "cpu":
            return None
        return self.rest_of_share(self.options.mem_fraction, weight_bytes, device_bytes)
