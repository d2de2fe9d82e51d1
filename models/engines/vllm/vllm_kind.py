"""vLLM's kind. Imports vLLM only to make an engine."""

from __future__ import annotations

from models.engines.engine_kind import CacheRoom, EngineKind, EngineOptions, EngineSpec, OptionKey
from models.engines.gpu_engine_kind import GpuEngineKind
from models.engines.installed import vllm_missing
from models.engines.vllm.options import CPU_KV_CACHE_MB, check_vllm_options
from models.settings import EngineConfig, ModelConfig, VllmConfig
from models.types import Engine


class VllmKind(GpuEngineKind[VllmConfig]):
    section = "vllm"
    transports = ("cuda_ipc", "nccl", "shared_memory", "gloo")
    any_transport = True
    applies_adapters = True
    max_adapter_rank = 512  # vLLM's largest max_lora_rank
    swaps_weights = True
    reads_model_files = True
    share_option = "gpu_memory_utilization"
    share_has_activations = True
    fuses_experts = True
    memory_remedy = "lower engine.vllm.kv_cache_mb, or raise slots_per_replica"

    @classmethod
    def shared_options(cls, sections: EngineConfig) -> VllmConfig:
        return sections.vllm

    def make(self, spec: EngineSpec, rank: int) -> Engine:
        from models.engines.vllm.vllm_engine import VllmEngine

        return VllmEngine(spec, self.options)

    def check_installed(self, role: str, model: ModelConfig, key: OptionKey) -> None:
        if missing := vllm_missing():
            raise ValueError(f"{role}.engine: {missing}")
        check_vllm_options(self.options)

    @property
    def quantizes(self) -> bool:
        return self.options.quantization != "none" or super().quantizes

    @property
    def bytes_in_layers(self) -> int | None:
        return None if self.options.quantization == "none" else 1

    @property
    def needs_whole_layers(self) -> bool:
        return self.options.quantization != "none" or bool(self.options.options.get("quantization"))

    # -- memory ----------------------------------------------------------------------------------------------------

    @property
    def memory_share(self) -> float | None:
        return self.options.gpu_memory_utilization

    @property
    def shares_leftover(self) -> bool:
        return self.options.gpu_memory_utilization is None

    @property
    def set_cache_bytes(self) -> float | None:
        return float(self.options.kv_cache_mb << 20) if self.options.kv_cache_mb else None

    @property
    def caches_prompts(self) -> bool:
        return self.options.prefix_caching

    def cache_room(self, weight_bytes: float, device: str, device_bytes: float | None) -> CacheRoom | None:
        if self.options.kv_cache_mb or device == "cpu":
            num_bytes = (self.options.kv_cache_mb or CPU_KV_CACHE_MB) << 20
            return CacheRoom(num_bytes=num_bytes, decided_by="engine.vllm.kv_cache_mb")
        if device_bytes is None:
            return None
        return self.rest_of_share(self.options.memory_share, weight_bytes, device_bytes)

    # -- routed experts, engines of several roles ------------------------------------------------------------------

    def why_no_experts(self, device: str) -> str:
        return "vLLM reports them only on a GPU" if device == "cpu" else ""

    def check_experts(self, key: OptionKey) -> None:
        if not self.options.prefix_caching:
            name = key("prefix_caching")
            raise ValueError(f"{name}: vLLM keeps the chosen experts in its prefix cache; type {name}=true")

    def wider(self, other: EngineKind[EngineOptions]) -> VllmKind:
        from models.engines.vllm.shared_options import wider_options

        assert isinstance(other, VllmKind)
        return VllmKind(wider_options(self.options, other.options))

    def different_options(self, other: EngineKind[EngineOptions]) -> list[str]:
        from models.engines.vllm.shared_options import different_options

        assert isinstance(other, VllmKind)
        return different_options(self.options, other.options)

    def different_models(self, path: str, other: str) -> list[str]:
        from models.engines.vllm.shared_options import different_shapes, shape_of

        return different_shapes(shape_of(path), shape_of(other))
