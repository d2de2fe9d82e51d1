"""What a user can set about models and engines. Frozen, checked, free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

DTYPES = ("float32", "bfloat16")
ENGINES = ("embedded",)


@dataclass(frozen=True)
class ModelShape:
    """Sizes as in a model's config.json: to plan a run where the model isn't at hand. Declared whole or not at all."""

    num_layers: int = 0  # 0: not declared
    hidden_size: int = 0
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    context_tokens: int = 0
    tied: bool = False  # the output head is the embedding

    def __post_init__(self) -> None:
        sizes = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "tied"}
        lacking = [name for name, size in sizes.items() if size < 1]
        if any(sizes.values()) and lacking:
            raise ValueError(f"{lacking[0]}: must be at least 1; a shape is declared whole, as in config.json")

    @property
    def declared(self) -> bool:
        return self.num_layers > 0


@dataclass(frozen=True)
class ModelConfig:
    """A model with a role (`policy` or `grm`).

    path: a Hugging Face directory or hub name, or `tiny://<name>` for a model that the project makes itself.
    shape: what task=plan reckons with where `path` isn't at hand; a run never looks at it.
    """

    path: str = "tiny://policy"
    engine: str = "embedded"
    dtype: str = "float32"
    chat_template: str | None = None  # a Jinja file, for a tokenizer without one (or with an unfit one)
    shape: ModelShape = field(default_factory=ModelShape)

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: missing; give a Hugging Face directory, a hub name or tiny://policy")
        if self.engine not in ENGINES:
            raise ValueError(f"engine: unknown engine {self.engine!r}; known: {', '.join(ENGINES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")


@dataclass(frozen=True)
class EmbeddedConfig:
    """The engine in torch, in our own process or actor."""

    max_batch_rows: int = 256  # requests that decode at once; more wait
    max_context_tokens: int = 0  # prompt + new tokens per row; 0: the model's own window
    prefill_tokens_per_step: int = 8192  # joining requests wait when their prompts exceed this
    recompute_kv_on_sync: bool = False  # True: kept requests prefill again under new weights

    def __post_init__(self) -> None:
        if self.max_batch_rows < 1:
            raise ValueError(f"max_batch_rows: must be at least 1, got {self.max_batch_rows}")
        if self.max_context_tokens < 0:
            raise ValueError(f"max_context_tokens: must be 0 or more, got {self.max_context_tokens}")
        if self.prefill_tokens_per_step < 1:
            raise ValueError(f"prefill_tokens_per_step: must be at least 1, got {self.prefill_tokens_per_step}")


@dataclass(frozen=True)
class EngineConfig:
    """Options by engine; `kind` is the default that `engine=x` sets for every role."""

    kind: str = "embedded"
    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
