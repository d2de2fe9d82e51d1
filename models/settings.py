"""What a user can set about models and engines. Frozen, checked, free of torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from typing import Any

DTYPES = ("float32", "bfloat16")
AUTO = "auto"  # bfloat16 on a GPU, float32 on cores
DEFAULT_MEMORY_SHARE = 0.85  # of a GPU that an engine of vLLM has alone
LORA_SYNCS = ("merged", "adapters")
# How known chat templates spell what is no text, as regular expressions: ChatML and Llama 3; DeepSeek; Llama 2 and
# Mistral; Gemma; Nemotron and T5; EXAONE; GLM.
CHAT_MARKUP = (
    r"<\|", r"<[a-z_]+\|>", r"<｜", r"</?s>", r"<(?:bos|eos|pad|unk)>", r"<</?SYS>>",
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK)\]",
    r"<(?:start|end)_of_turn>", r"<extra_id_\d+>", r"<SPECIAL_\d+>", r"\[\|", r"\[g?MASK\]", r"<[se]op>",
)  # fmt: skip
INSTALL_PEFT = 'pip install -e ".[lora]"'
QUANTIZATIONS = ("none", "int8", "int4")
# Of a tokenizer's apply_chat_template: what the renderer sets itself, or must not be set.
TEMPLATE_KWARGS_OF_OURS = frozenset(
    ("self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
     "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "return_assistant_tokens_mask", "tokenizer_kwargs")
)  # fmt: skip


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
class LoraConfig:
    """Adapters that learn instead of the model's weights (LoRA, arXiv 2106.09685): W + alpha / rank * B A.

    There is no dropout: the ratio of two passes would no longer be that of two policies.

    sync: what travels to the engines. merged: the weights with the adapters' change in them, to any engine; adapters:
        A and B alone, to one that applies them itself.
    """

    rank: int = 0  # 0: all weights learn
    alpha: float = 32.0
    target_modules: list[str] = field(default_factory=list)  # as q_proj; empty: all linear layers of the blocks
    sync: str = "merged"

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank: must be 0 (no adapters) or more, got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"alpha: must be above 0, got {self.alpha}")
        if self.sync not in LORA_SYNCS:
            raise ValueError(f"sync: unknown value {self.sync!r}; known: {', '.join(LORA_SYNCS)}")

    @property
    def learns(self) -> bool:
        """Are there adapters, which then are all that learns?"""
        return self.rank > 0

    @property
    def in_engines(self) -> bool:
        """Do the engines' models have them too?"""
        return self.learns and self.sync == "adapters"


@dataclass(frozen=True)
class ModelConfig:
    """A model with a role (`policy` or `grm`).

    path: a Hugging Face directory or hub name, or `tiny://<name>` for a model that the project makes itself; for
        engine=openai the model's name at the endpoint.
    engine: embedded, vllm, sglang, openai, or the dotted path of an EngineKind of your own.
    chat_template_kwargs: what its chat template branches on, as enable_thinking: false; sent along to an endpoint.
    engine_options: of this role, where they differ from `engine.<engine>`.
    shape: what task=plan reckons with where `path` isn't at hand; a run never looks at it.
    lora: where the model learns, by adapters.
    """

    path: str = "tiny://policy"
    engine: str = "embedded"
    engine_options: dict[str, Any] = field(default_factory=dict)
    dtype: str = AUTO  # bfloat16 on a GPU, float32 on cores
    chat_template: str | None = None  # a Jinja file, for a tokenizer without one (or with an unfit one)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    shape: ModelShape = field(default_factory=ModelShape)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: missing; give a Hugging Face directory, a hub name or tiny://policy")
        if self.dtype not in (AUTO, *DTYPES):
            raise ValueError(f"dtype: unknown dtype {self.dtype!r}; known: {', '.join((AUTO, *DTYPES))}")
        for name, value in self.chat_template_kwargs.items():
            check_template_kwarg(name, value)


def check_template_kwarg(name: str, value: object) -> None:
    """Of a chat template: a name that isn't the renderer's own, and a value that JSON knows."""
    if not isinstance(name, str) or not name.isidentifier() or name in TEMPLATE_KWARGS_OF_OURS:
        raise ValueError(
            f"chat_template_kwargs: {name!r} can't be set; give names that the chat template knows, as "
            "chat_template_kwargs={enable_thinking: false}"
        )
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"chat_template_kwargs.{name}: expected true, false, a number, a text, or lists and objects of them, got "
            f"{value!r}"
        ) from error


@dataclass(frozen=True)
class EmbeddedConfig:
    """The engine in torch, in our own process or actor."""

    max_batch_rows: int = 256  # requests that decode at once; more wait
    max_context_tokens: int = 0  # prompt + new tokens per row; 0: the model's own window
    prefill_tokens_per_step: int = 8192  # joining requests wait when their prompts exceed this
    recompute_kv_on_sync: bool = False  # True: kept requests prefill again under new weights
    quantize: str = "none"  # int8, int4: sample from weights rounded to so few bits (per row, absmax); no faster

    def __post_init__(self) -> None:
        if self.quantize not in QUANTIZATIONS:
            raise ValueError(f"quantize: unknown value {self.quantize!r}; known: {', '.join(QUANTIZATIONS)}")
        if self.max_batch_rows < 1:
            raise ValueError(f"max_batch_rows: must be at least 1, got {self.max_batch_rows}")
        if self.max_context_tokens < 0:
            raise ValueError(f"max_context_tokens: must be 0 or more, got {self.max_context_tokens}")
        if self.prefill_tokens_per_step < 1:
            raise ValueError(f"prefill_tokens_per_step: must be at least 1, got {self.prefill_tokens_per_step}")


@dataclass(frozen=True)
class VllmConfig:
    """vLLM's AsyncLLM, in an actor of ours. What isn't named here passes through `options`, as its own arguments."""

    max_batch_rows: int = 256  # vLLM's max_num_seqs
    max_context_tokens: int = 0  # vLLM's max_model_len; 0: the model's own window
    kv_cache_mb: int = 0  # 0: on a GPU what gpu_memory_utilization leaves; on a CPU 256
    gpu_memory_utilization: float | None = None  # null: 0.85; of a GPU that it shares, what the others leave
    enforce_eager: bool = False  # True starts sooner and decodes slower; a CPU is always eager
    prefix_caching: bool = True
    recompute_kv_on_sync: bool = False  # True: kept requests prefill again under new weights
    sleep_mode: bool = False  # True: may lend its memory to a learner on the same GPU
    cpu_threads: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # other arguments of vLLM's AsyncEngineArgs

    def __post_init__(self) -> None:
        for key in ("max_batch_rows", "cpu_threads"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1, got {getattr(self, key)}")
        for key in ("max_context_tokens", "kv_cache_mb"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization: must be above 0 and at most 1, got {share}")

    @property
    def memory_share(self) -> float:
        """Of a whole device, weights included."""
        return DEFAULT_MEMORY_SHARE if self.gpu_memory_utilization is None else self.gpu_memory_utilization


@dataclass(frozen=True)
class SglangConfig:
    """SGLang servers: started by us from an environment of their own, or joined by URL."""

    python: str = ""  # the interpreter of SGLang's environment; empty: this one
    urls: list[str] = field(default_factory=list)  # servers that run already, one per replica; empty: start our own
    api_key_env: str = "SGLANG_API_KEY"  # the environment variable with a joined server's key; our own get a new one
    max_batch_rows: int = 256  # SGLang's max-running-requests
    max_context_tokens: int = 0  # SGLang's context-length; 0: the model's own window
    mem_fraction: float = 0.8  # SGLang's mem-fraction-static
    recompute_kv_on_sync: bool = False  # True: kept requests prefill again under new weights (pause mode retract)
    sleep_mode: bool = False  # SGLang's enable-memory-saver: may lend its memory to a learner on the same GPU
    start_timeout_s: float = 300.0  # until a server of ours answers
    options: dict[str, Any] = field(default_factory=dict)  # other flags of SGLang's server, without the dashes

    def __post_init__(self) -> None:
        if self.max_batch_rows < 1:
            raise ValueError(f"max_batch_rows: must be at least 1, got {self.max_batch_rows}")
        if self.max_context_tokens < 0:
            raise ValueError(f"max_context_tokens: must be 0 or more, got {self.max_context_tokens}")
        if not 0 < self.mem_fraction < 1:
            raise ValueError(f"mem_fraction: must be between 0 and 1, got {self.mem_fraction}")
        for url in self.urls:
            _refuse_userinfo("urls", url)
        if not self.start_timeout_s > 0:
            raise ValueError(f"start_timeout_s: must be above 0, got {self.start_timeout_s}")


@dataclass(frozen=True)
class OpenAIConfig:
    """A judge behind an OpenAI-compatible endpoint; `grm.path` is the model's name there."""

    base_url: str = "https://api.openai.com/v1"
    api_key_env: str = "OPENAI_API_KEY"  # the environment variable with the key; empty: the endpoint wants none
    max_context_tokens: int = 0  # 0: not known; what doesn't fit is refused by the endpoint
    max_retries: int = 4  # of a call that was refused for now (429, 5xx) or got no answer
    max_connections: int = 64  # calls under way at once
    requests_per_minute: int = 0  # tries count too; 0: no limit of ours
    tokens_per_minute: int = 0  # of prompts and answers; 0: no limit of ours
    extra_body: dict[str, Any] = field(default_factory=dict)  # further fields of each request
    # Regular expressions: what the policy's text spells of it is broken by a space before the judge is shown it.
    chat_markup: list[str] = field(default_factory=lambda: list(CHAT_MARKUP))

    def __post_init__(self) -> None:
        for pattern in self.chat_markup:
            _check_markup(pattern)
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url: must begin with http:// or https://, got {self.base_url!r}")
        _refuse_userinfo("base_url", self.base_url)
        for key in ("max_context_tokens", "max_retries", "requests_per_minute", "tokens_per_minute"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}: must be 0 or more, got {getattr(self, key)}")
        if self.max_connections < 1:
            raise ValueError(f"max_connections: must be at least 1, got {self.max_connections}")


def _refuse_userinfo(key: str, url: str) -> None:
    """URLs stand in logs and files."""
    if re.match(r"\w+://[^/?#]*@", url):
        host = re.sub(r"^(\w+://)[^/?#]*@", r"\1", url)
        raise ValueError(
            f"{key}: a URL may not hold a name or a password; type {host!r}, export the key in an environment variable "
            "and give its name as api_key_env"
        )


def _check_markup(pattern: str) -> None:
    try:
        matches_nothing_at_all = re.compile(pattern).match("") is not None
    except re.error as error:
        raise ValueError(f"chat_markup: {pattern!r} is no regular expression: {error}") from None
    if matches_nothing_at_all:
        raise ValueError(
            f"chat_markup: {pattern!r} matches an empty text, and so everywhere; type what markup begins with"
        )


@dataclass(frozen=True)
class EngineConfig:
    """Options by engine; `kind` is the default that `engine=x` sets for every role."""

    kind: str = "embedded"
    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
