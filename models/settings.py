"""Settings of models and engines. Frozen, checked, free of torch."""

import json
import re
from dataclasses import dataclass, field, fields
from typing import Any

from grmpipe.models.bounds import Bounded, above, above_0_to_1, at_least, one_of
from grmpipe.models.chat.tool_calls import AUTO_PARSER, check_tool_parser
from grmpipe.models.urls import check_url

DTYPES = ("float32", "bfloat16")
AUTO = "auto"  # bfloat16 on a GPU, float32 on cores
DEFAULT_MEMORY_SHARE = 0.85  # share of a GPU that an engine of vLLM has alone
CHUNK_LOGITS = 1 << 26  # logits that are copied to float32 at a time: 256 MiB
CHECKPOINTING = ("none", "selective", "full")
LM_HEAD, ROUTER = "lm_head", "router"  # modules that may compute in float32 while others round
LORA_SYNCS = ("merged", "adapters")
# The markup of known chat templates, and tokens that models reserve, as regular expressions: ChatML and Llama 3;
# DeepSeek; Llama 2 and Mistral; Gemma; Command R; Nemotron and T5; EXAONE; GLM; InternLM, Baichuan, Pangu; Seed-OSS and
# MiniMax; LongCat; Ling; Kimi-VL. Then thoughts and calls of tools, which many templates write with the same tags.
CHAT_MARKUP = (
    r"<\|", r"<[a-z_]+\|>", r"</?｜", r"</?s>", r"<(?:bos|eos|pad|unk|cls|sep|mask)(?::\d+)?>", r"<</?SYS>>",
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK|ARGS|CALL_ID|MODEL_SETTINGS)\]",
    r"<(?:start|end|beginning)_of_[a-z]+>", r"<(?:[A-Z]+(?:_[A-Z]+)*_TOKEN|PAD|UNK|CLS|SEP)>", r"<unused\d+>",
    r"<extra_id_\d+>", r"<SPECIAL_\d+>", r"\[\|", r"\[[gs]?MASK\]", r"<[se]op>", r"\[UNUSED_TOKEN_\d+\]",
    r"<TOKENS_UNUSED_\d+>", r"<eo[ah]>", r"<reserved_\d+>", r"\[unused\d+\]", r"</?(?:seed|minimax):[a-z_]+>",
    r"\]~!?b[\[\]]", r"\[e~\[", r"</?longcat_[a-z_]+>", r"</?role>", r"◁/?[a-z_]+▷",
    r"</?(?:think|thinking|thought|tools|tool_calls?|tool_responses?|function_calls?|function_results?|response)>",
    r"</?(?:TOOLCALL|TOOL_CALLS?|TOOL_RESPONSE|AVAILABLE_TOOLS)>", r"</?arg_(?:key|value)>",
    r"<(?:function|parameter)=", r"<invoke name=", r"</(?:function|parameter|invoke)>",
)  # fmt: skip
INSTALL_PEFT = 'pip install "grmpipe[lora]"'
CLASSIFY, EMBEDDINGS = "classify", "embeddings"  # routes of scores: vLLM's and SGLang's
# Fields by which vLLM and SGLang go on with an assistant's message that comes last; sent only with such a message.
CONTINUES = ("continue_final_message", "add_generation_prompt")
SPECULATIONS = ("none", "ngram")
QUANTIZATIONS = ("none", "int8", "int4", "fp8")
# engine.vllm.quantization -> vLLM's name of it. Its own `fp8` is for checkpoints in fp8.
VLLM_QUANTIZATIONS = {
    "none": "", "fp8": "fp8_per_channel", "fp8_per_block": "fp8_per_block", "fp8_per_tensor": "fp8_per_tensor",
}  # fmt: skip
# Arguments of a tokenizer's apply_chat_template that the renderer sets itself, or that must not be set.
TEMPLATE_KWARGS_OF_OURS = frozenset(
    ("self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
     "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "return_assistant_tokens_mask", "tokenizer_kwargs")
)  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """Sizes as in the model's config.json, for task=plan and task=simulate without the model's files.

    Either all sizes are set or none; those of experts only for a mixture.
    """

    num_layers: int = 0  # Number of transformer layers; 0: no shape is set.
    hidden_size: int = 0  # Size of a hidden state.
    intermediate_size: int = 0  # Inner size of the feed-forward layers.
    num_heads: int = 0  # Number of attention heads.
    num_kv_heads: int = 0  # Number of heads of keys and values.
    head_dim: int = 0  # Size of an attention head.
    vocab_size: int = 0  # [tokens] Size of the vocabulary.
    context_tokens: int = 0  # Longest sequence that the model takes.
    tied: bool = False  # The output head is tied to the embedding.
    num_experts: int = 0  # Experts of each layer of a mixture; 0: a dense model.
    experts_per_token: int = 0  # Experts that a token is sent to (num_experts_per_tok).
    moe_intermediate_size: int = 0  # Inner size of an expert.

    def __post_init__(self) -> None:
        experts = {name: getattr(self, name) for name in ("num_experts", "experts_per_token", "moe_intermediate_size")}
        names = [spec.name for spec in fields(self) if spec.name != "tied" and spec.name not in experts]
        sizes = {name: getattr(self, name) for name in names}
        needed = sizes | experts if any(experts.values()) else sizes
        lacking = [name for name, size in needed.items() if size < 1]
        if any(needed.values()) and lacking:
            raise ValueError(f"{lacking[0]}: must be at least 1; declare all fields of a shape, as in config.json")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token: must be at most num_experts = {self.num_experts}, got {self.experts_per_token}"
            )

    @property
    def declared(self) -> bool:
        return self.num_layers > 0


@dataclass(frozen=True)
class LoraConfig(Bounded):
    """Adapters that are trained instead of the model's weights (LoRA, arXiv 2106.09685): W + alpha / rank * B A.

    There is no dropout: it would change the ratio of two policies.
    """

    rank: int = at_least(0, 0)  # Rank of the adapters; 0: no adapters, all weights are trained.
    alpha: float = above(0, 32.0)  # The adapters' change of a weight is multiplied by alpha / rank.
    # Names of the linear layers with adapters, such as q_proj; empty: all within the blocks.
    target_modules: list[str] = field(default_factory=list)
    # What a push sends: the weights with the adapters' change merged in, or the adapters alone.
    sync: str = one_of(LORA_SYNCS, "merged")
    path: str | None = None  # Directory of an adapter in peft's format, with which it begins; null: a new adapter.

    @property
    def learns(self) -> bool:
        """Whether there are adapters, which are then the only weights that may be trained."""
        return self.rank > 0

    @property
    def in_engines(self) -> bool:
        """Whether the engines' models have the adapters too."""
        return self.learns and self.sync == "adapters"


@dataclass(frozen=True)
class PriceConfig(Bounded):
    """The price of a model behind an endpoint; without one no cost is shown."""

    input: float | None = at_least(0, None)  # [USD/1M tokens] Price of a prompt's tokens; null: unknown.
    # [USD/1M tokens] Price of prompt tokens that the endpoint reports as cached; null: that of the others.
    cached: float | None = at_least(0, None)
    # [USD/1M tokens] Price of sampled tokens, thoughts included; null: unknown.
    output: float | None = at_least(0, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, other in (("input", "output"), ("output", "input")):
            if getattr(self, name) is None and (getattr(self, other), self.cached) != (None, None):
                raise ValueError(f"{name}: missing; a price needs input and output, in USD per million tokens")

    @property
    def is_known(self) -> bool:
        return self.input is not None

    def cost_usd(self, prompt_tokens: float, cached_tokens: float, sampled_tokens: float) -> float:
        """The cost of requests; 0 where the price is unknown. cached_tokens: of the prompt tokens."""
        if self.input is None or self.output is None:
            return 0.0
        cached = self.input if self.cached is None else self.cached
        fresh = prompt_tokens - cached_tokens
        return (self.input * fresh + cached * cached_tokens + self.output * sampled_tokens) / 1e6


@dataclass(frozen=True)
class ModelConfig(Bounded):
    """The model of a role."""

    # Hugging Face directory or hub name, or tiny://<name> for a model of this project; with engine=openai the model's
    # name at the endpoint.
    path: str = "tiny://policy"
    # Engine that serves the model, or the dotted path of your own EngineKind; empty: that of engine.kind.
    engine: str = ""
    # Options of this role's engine that differ from engine.<engine>.
    engine_options: dict[str, Any] = field(default_factory=dict)
    # Type of the weights in the engine; auto: bfloat16 on a GPU, float32 elsewhere.
    dtype: str = one_of((AUTO, *DTYPES), AUTO, "dtype")
    # Jinja file with a chat template; null: the tokenizer's own.
    chat_template: str | None = None
    # Variables of the chat template, such as {enable_thinking: false}; an endpoint gets them with each request.
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # Opening and closing marker of the model's thoughts, as vLLM's reasoning parsers know them; null: found in the
    # tokenizer or the chat template; empty: the model has no thoughts.
    thinking_markers: list[str] | None = None
    shape: ModelShape = field(default_factory=ModelShape)
    lora: LoraConfig = field(default_factory=LoraConfig)
    price: PriceConfig = field(default_factory=PriceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ValueError("path: missing; give a Hugging Face directory, a hub name or tiny://policy")
        for name, value in self.chat_template_kwargs.items():
            check_template_kwarg(name, value)
        check_thinking_markers(self.thinking_markers)


@dataclass(frozen=True)
class PolicyConfig(ModelConfig):
    """The model in training, which may call tools."""

    # Format of the model's calls of tools, as vLLM's --tool-call-parser names it: hermes, llama3_json, pythonic,
    # qwen3_coder or mistral; or the dotted path of your own parser; auto: found in the chat template.
    tool_parser: str = AUTO_PARSER

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tool_parser(self.tool_parser)


def check_template_kwarg(name: str, value: object) -> None:
    """Check a variable of a chat template: its name isn't the renderer's, and its value can be written as JSON."""
    if not isinstance(name, str) or not name.isidentifier() or name in TEMPLATE_KWARGS_OF_OURS:
        raise ValueError(
            f"chat_template_kwargs: {name!r} can't be set; give names that the chat template uses, as in "
            "chat_template_kwargs={enable_thinking: false}"
        )
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"chat_template_kwargs.{name}: expected true, false, a number, a text, or lists and objects of them, got "
            f"{value!r}"
        ) from error


def check_thinking_markers(markers: list[str] | None) -> None:
    """Check that there are two different markers, or none."""
    if markers and not (len(markers) == 2 and all(marker.strip() for marker in markers) and len(set(markers)) == 2):
        raise ValueError(
            f"thinking_markers: expected the opening and the closing marker, got {markers}; type "
            "thinking_markers=['<think>', '</think>'], [] for a model without thoughts, or null to find them"
        )


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Which activations a forward pass keeps for backward, and where.

    checkpointing: none: all; full: the inputs of layers, and the rest is computed again; selective: the outputs of
    attention as well. offload: those inputs wait in pinned host memory.
    """

    checkpointing: str = "none"
    offload: bool = False

    @property
    def recomputes(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        return self.checkpointing != "none"


KEEP_ALL = Activations()


@dataclass(frozen=True)
class ParallelConfig(Bounded):
    """How the ranks of a learner share one model. Whatever these numbers leave over is FSDP2: shards of the weights.

    `dp_replicate` divides the ranks; `cp` and `ep` divide the ranks of one copy.
    """

    # Copies of the sharded model (HSDP): layers are gathered within a copy, gradients are averaged over copies.
    dp_replicate: int = at_least(1, 1)
    # Ranks that share each sample (context parallelism by Ulysses, arXiv 2309.14509); divides the query heads.
    cp: int = at_least(1, 1)
    ep: int = at_least(1, 1)  # Ranks that divide the experts of each layer (expert parallelism); divides their number.

    def check_ranks(self, num_ranks: int) -> None:
        """Raises ValueError if these ranks can't be grouped like this."""
        if num_ranks % self.dp_replicate:
            raise ValueError(
                f"dp_replicate: {self.dp_replicate} copies of the model need a multiple of as many ranks, and there "
                f"are {num_ranks}; type a divisor of it"
            )
        for name in ("cp", "ep"):
            if num_ranks // self.dp_replicate % getattr(self, name):
                raise ValueError(
                    f"{name}: {getattr(self, name)} doesn't divide the {num_ranks // self.dp_replicate} ranks of one "
                    "copy of the model; type a divisor of them"
                )


@dataclass(frozen=True)
class EmbeddedConfig(Bounded):
    """The embedded engine, in torch: in the driver's process or an actor."""

    max_batch_rows: int = at_least(1, 256)  # [requests] Requests that decode at once; the others wait.
    max_context_tokens: int = at_least(0, 0)  # Prompt and new tokens of a request; 0: the model's own window.
    # Requests in flight at a push prefill again with the new weights; false: they keep their keys and values.
    recompute_kv_on_sync: bool = False
    # Sample from weights rounded to int8, int4 or fp8 (E4M3), per row by its largest value; this makes nothing faster.
    quantize: str = one_of(QUANTIZATIONS, "none")


@dataclass(frozen=True)
class VllmConfig(Bounded):
    """vLLM's AsyncLLM in its own actor. Other settings are passed in `options`."""

    max_batch_rows: int = at_least(1, 256)  # [requests] Requests that decode at once (vLLM's max_num_seqs).
    # Prompt and new tokens of a request (vLLM's max_model_len); 0: the model's own window.
    max_context_tokens: int = at_least(0, 0)
    # Memory for keys and values; 0: what gpu_memory_utilization leaves on a GPU, 256 MiB on a CPU.
    kv_cache_mb: int = at_least(0, 0)
    # [share] Part of the GPU's memory for weights and cache; null: 0.85, or on a shared GPU a part of what the others
    # leave.
    gpu_memory_utilization: float | None = above_0_to_1(None)
    # Requests in flight at a push prefill again with the new weights; false: they keep their keys and values.
    recompute_kv_on_sync: bool = False
    # Weights of linear layers that vLLM rounds itself, at its start and at every push: fp8 (per output channel),
    # fp8_per_block (of 128 x 128) or fp8_per_tensor; a policy that learns from them needs algorithm.correction.
    quantization: str = one_of(VLLM_QUANTIZATIONS, "none")
    options: dict[str, Any] = field(default_factory=dict)  # Other arguments of vLLM's AsyncEngineArgs.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantization != "none" and "quantization" in self.options:
            raise ValueError(
                f"options.quantization: {self.options['quantization']!r} and quantization={self.quantization} exclude "
                "each other; type one of them"
            )

    @property
    def memory_share(self) -> float:
        """The share of a whole device, including weights."""
        return DEFAULT_MEMORY_SHARE if self.gpu_memory_utilization is None else self.gpu_memory_utilization


@dataclass(frozen=True)
class SglangConfig(Bounded):
    """SGLang servers, started by grmpipe from their own environment, or joined by URL."""

    python: str = ""  # Interpreter of SGLang's environment; empty: the one that runs grmpipe.
    # URLs of running servers to join, one per replica, with the key in the environment variable SGLANG_API_KEY, if they
    # have one; empty: servers are started.
    urls: list[str] = field(default_factory=list)
    max_batch_rows: int = at_least(1, 256)  # [requests] Requests that decode at once (SGLang's max-running-requests).
    # Prompt and new tokens of a request (SGLang's context-length); 0: the model's own window.
    max_context_tokens: int = at_least(0, 0)
    mem_fraction: float = 0.8  # [share] Part of the GPU's memory for weights and cache (SGLang's mem-fraction-static).
    # Requests in flight at a push prefill again with the new weights (pause mode retract); false: they keep their keys
    # and values.
    recompute_kv_on_sync: bool = False
    # Other flags of SGLang's server, without the dashes.
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mem_fraction < 1:
            raise ValueError(f"mem_fraction: must be between 0 and 1, got {self.mem_fraction}")
        for url in self.urls:
            check_url("urls", url, allow_query=False)


@dataclass(frozen=True)
class OpenAIConfig(Bounded):
    """A model behind an OpenAI-compatible endpoint, which judges, scores or teaches; its `path` is its name there."""

    base_url: str = "https://api.openai.com/v1"  # URL of the endpoint.
    # Environment variable with the endpoint's key; empty: the endpoint needs none.
    api_key_env: str = "OPENAI_API_KEY"
    # The model's context window there; 0: unknown, and the endpoint refuses what doesn't fit.
    max_context_tokens: int = at_least(0, 0)
    max_retries: int = at_least(0, 4)  # [retries] Retries of a call that gets no answer, or a 429 or 5xx.
    max_connections: int = at_least(1, 64)  # [calls] Most calls in flight.
    requests_per_minute: int = at_least(0, 0)  # [calls/min] Most calls, including retries; 0: no limit here.
    tokens_per_minute: int = at_least(0, 0)  # [tokens/min] Most tokens of prompts and answers; 0: no limit here.
    extra_body: dict[str, Any] = field(default_factory=dict)  # Further fields of each request.
    # For a scalar reward model: the route of its scores, vLLM's /classify (classify) or SGLang's /v1/embeddings
    # (embeddings).
    scores: str = one_of((CLASSIFY, EMBEDDINGS), CLASSIFY)
    # For a scalar reward model and a teacher: Hugging Face directory or hub name of its tokenizer and chat template;
    # empty: path.
    tokenizer: str = ""
    # Regular expressions of chat markup, which a space breaks in the policy's text before the judge reads it.
    chat_markup: list[str] = field(default_factory=lambda: list(CHAT_MARKUP))

    def __post_init__(self) -> None:
        super().__post_init__()
        for pattern in self.chat_markup:
            _check_markup(pattern)
        check_url("base_url", self.base_url)


def _check_markup(pattern: str) -> None:
    try:
        matches_nothing_at_all = re.compile(pattern).match("") is not None
    except re.error as error:
        raise ValueError(f"chat_markup: {pattern!r} is not a regular expression: {error}") from None
    if matches_nothing_at_all:
        raise ValueError(
            f"chat_markup: {pattern!r} matches an empty text, and so everywhere; type the beginning of the markup"
        )


@dataclass(frozen=True)
class EngineConfig(Bounded):
    """Options by engine, for all roles with that engine."""

    # Engine of the models that name none: embedded, vllm, sglang or openai.
    kind: str = "embedded"
    # Speculative decoding by engines of models that judge: none; or ngram: tokens that followed the same ones earlier
    # are drafted, and verified together. Worth it while an engine decodes few requests at once.
    speculation: str = one_of(SPECULATIONS, "none")
    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
