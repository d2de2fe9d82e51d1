"""SGLang's kind. Starts servers only if they aren't joined."""

from collections.abc import Mapping

from grmpipe.models.engines.engine_kind import EngineKind, EngineSpec, OptionKey
from grmpipe.models.engines.engine_memory import EngineMemory, are_coarse
from grmpipe.models.engines.installed import nccl_version, sglang_missing
from grmpipe.models.settings import EngineConfig, ModelConfig, SglangConfig
from grmpipe.models.types import Engine


class SglangKind(EngineKind[SglangConfig]):
    section = "sglang"
    tensor_parallel = True
    grammar = True
    scores = True
    top_logprobs = True
    transports = ("nccl", "gloo", "disk")
    applies_adapters = True
    adapter_transports = ("disk",)

    @classmethod
    def read_options(cls, sections: EngineConfig) -> SglangConfig:
        return sections.sglang

    def make(self, spec: EngineSpec, rank: int) -> Engine:
        """Start a server, or join the running one of this replica."""
        from grmpipe.models.engines.sglang.sglang_engine import SglangEngine

        if self.joined:
            return SglangEngine.join(self.options.urls[rank], spec, self.options)
        return SglangEngine.start(spec, self.options)

    def check_installed(self, role: str, model: ModelConfig, key: OptionKey) -> None:
        if not self.joined and (missing := sglang_missing(self.options.python)):
            raise ValueError(missing if missing.startswith("engine.") else f"{role}.engine: {missing}")

    def why_no_adapters(self, device: str) -> str:
        """As of SGLang 0.5.23's lora/layers.py and lora/backend/torch_backend.py, which pin memory."""
        if self.joined:
            return "a joined SGLang server may have no room for adapters, or drop them again"
        return "SGLang applies adapters on GPUs only" if device == "cpu" else ""

    def why_no_drafts(self, device: str) -> str:
        if self.joined:
            return "a joined SGLang server drafts as it was started (--speculative-algorithm NGRAM)"
        return "SGLang drafts on GPUs only" if device == "cpu" else ""

    def nccl_version(self) -> str:
        return "" if self.joined else nccl_version(self.options.python)

    @property
    def nccl_variables(self) -> Mapping[str, str]:
        """As of SGLang 0.5.23's entrypoints/engine.py."""
        symmetric, nvls = (self.options.options.get(flag) is True for flag in ("enable-symm-mem", "enable-nccl-nvls"))
        return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(symmetric or nvls))}

    @property
    def joined(self) -> int:
        return len(self.options.urls)

    @property
    def max_rows(self) -> int:
        return self.options.max_batch_rows

    @property
    def quantizes(self) -> bool:
        return are_coarse(self.options.options)

    @property
    def memory(self) -> EngineMemory:
        return EngineMemory(
            section=self.section,
            frees_gpu=True,
            share_option="mem_fraction",
            share=None if self.joined else self.options.mem_fraction,
            lone_share=self.options.mem_fraction,
            remedy="lower engine.sglang.mem_fraction, or raise slots_per_replica",
        )
