"""vLLM's kind. Imports vLLM only to make an engine."""

from __future__ import annotations

from grmpipe.models.engines.engine_kind import EngineKind, EngineSpec, OptionKey
from grmpipe.models.engines.engine_memory import EngineMemory, are_coarse
from grmpipe.models.engines.installed import vllm_missing
from grmpipe.models.engines.vllm.options import CPU_KV_CACHE_MB, check_vllm_options
from grmpipe.models.settings import EngineConfig, ModelConfig, VllmConfig
from grmpipe.models.types import Engine

DEFAULT_MAX_LOGPROBS = 20  # vLLM's, of a request
EXPERT_PARALLEL = "enable_expert_parallel"  # vLLM's argument
PREFIX_CACHING = "enable_prefix_caching"  # vLLM's argument, on unless a user sets it otherwise


class VllmKind(EngineKind[VllmConfig]):
    section = "vllm"
    tensor_parallel = True
    grammar = True
    scores = True
    fp8_option = "quantization"
    top_logprobs = True
    transports = ("cuda_ipc", "nccl", "shared_memory", "gloo")
    any_transport = True
    applies_adapters = True
    max_adapter_rank = 512  # vLLM's largest max_lora_rank
    reads_model_files = True

    @classmethod
    def read_options(cls, sections: EngineConfig) -> VllmConfig:
        return sections.vllm

    def make(self, spec: EngineSpec, rank: int) -> Engine:
        from grmpipe.models.engines.vllm.vllm_engine import VllmEngine

        return VllmEngine(spec, self.options)

    def check_installed(self, role: str, model: ModelConfig, key: OptionKey) -> None:
        if missing := vllm_missing():
            raise ValueError(f"{role}.engine: {missing}")
        check_vllm_options(self.options)

    def joins_experts(self, num_gpus: int) -> bool:
        """Only where each GPU holds a part of every expert (expert_stacks.py): not with expert parallelism, in which
        each holds some of them whole, nor in a type of its own.
        """
        divides = num_gpus > 1 and bool(self.options.options.get(EXPERT_PARALLEL, False))
        return not divides and not self.quantizes

    @property
    def max_rows(self) -> int:
        return self.options.max_batch_rows

    @property
    def most_likely_tokens(self) -> int:
        return int(self.options.options.get("max_logprobs", DEFAULT_MAX_LOGPROBS))

    @property
    def caches_prompts(self) -> bool:
        return bool(self.options.options.get(PREFIX_CACHING, True))

    @property
    def quantizes(self) -> bool:
        return self.options.quantization != "none" or are_coarse(self.options.options)

    @property
    def memory(self) -> EngineMemory:
        options = self.options
        return EngineMemory(
            section=self.section,
            frees_gpu=True,
            bytes_in_layers=None if options.quantization == "none" else 1,
            share_option="gpu_memory_utilization",
            share=options.gpu_memory_utilization,
            lone_share=options.memory_share,
            shares_leftover=options.gpu_memory_utilization is None,
            share_has_activations=True,
            cache_option="kv_cache_mb",
            cache_bytes=float(options.kv_cache_mb << 20) or None,
            cpu_cache_bytes=float(CPU_KV_CACHE_MB << 20),
            remedy="lower engine.vllm.kv_cache_mb, or raise slots_per_replica",
        )

    # -- routed experts -----------------------------------------------------------------

    def why_no_experts(self, device: str) -> str:
        return "vLLM reports them only on a GPU" if device == "cpu" else ""

    def why_no_drafts(self, device: str) -> str:
        # Its CPU kernel that repeats each request's temperature for its drafts writes into a copy (0.32.0): logits are
        # divided by what was in memory before.
        return "vLLM for CPUs samples wrong tokens where it drafts" if device == "cpu" else ""

    def check_experts(self, key: OptionKey) -> None:
        if not self.caches_prompts:
            name = f"{key('options')}.{PREFIX_CACHING}"
            raise ValueError(f"{name}: vLLM keeps the chosen experts in its prefix cache; type {name}=true")
