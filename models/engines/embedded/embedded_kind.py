"""The embedded engine's kind. Imports torch only to make an engine."""

from grmpipe.models.engines.engine_kind import EngineKind, EngineSpec
from grmpipe.models.engines.engine_memory import MOST_PACKED, EngineMemory
from grmpipe.models.settings import EmbeddedConfig, EngineConfig
from grmpipe.models.types import Engine


class EmbeddedKind(EngineKind[EmbeddedConfig]):
    section = "embedded"
    scores = True
    top_logprobs = True
    transports = ("cuda_ipc", "nccl", "shared_memory", "object_store")
    any_transport = True
    in_process = True
    grammar = True
    applies_adapters = True
    reads_model_files = True
    checkpoint_names = False  # its model has transformers' names
    seeds_by_position = True
    batch_invariant = True

    @classmethod
    def read_options(cls, sections: EngineConfig) -> EmbeddedConfig:
        return sections.embedded

    def make(self, spec: EngineSpec, rank: int) -> Engine:
        from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine

        return EmbeddedEngine(spec, self.options)

    @property
    def max_rows(self) -> int:
        return self.options.max_batch_rows

    @property
    def quantizes(self) -> bool:
        return self.options.quantize != "none"

    @property
    def memory(self) -> EngineMemory:
        remedy = "lower engine.embedded.max_batch_rows or engine.embedded.max_context_tokens"
        return EngineMemory(frees_cache=True, grows_cache=True, most_packed=MOST_PACKED, remedy=remedy)

    def why_no_drafts(self, device: str) -> str:
        return ""

    def why_no_experts(self, device: str) -> str:
        return ""
