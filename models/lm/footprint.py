"""The memory of a model, from its sizes: weights, KV cache, learner, activations. Loads no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.lm.flops import FULL, ModelFlops
from models.settings import CHUNK_LOGITS, LoraConfig, ModelShape

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

LIVE_PIECES = 3  # float32 pieces of the logits during a backward pass: the logits, their softmax, their gradient
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """Bytes at one moment: gathered weights with their gradients, and activations kept for backward."""

    gathered: int
    activations: int

    @property
    def total(self) -> int:
        return self.gathered + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The sizes of one copy of a decoder. `num_root_parameters`: of the embedding and the output head, outside of all
    layers. `linear_widths`: name of the blocks' linear layers -> sum of inputs and outputs over all blocks.
    `active_layer_weights`: of the layers' matrices, with only as many experts as a token is sent to. `attention_flops`:
    as in ModelFlops.
    """

    num_parameters: int
    num_root_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    query_width: int  # query heads x head dim
    kv_width: int  # key heads x head dim
    vocab_size: int
    linear_widths: Mapping[str, int]
    active_layer_weights: int
    attention_flops: Mapping[int, int]

    @property
    def num_active_parameters(self) -> int:
        """The parameters that a token passes, norms left out: all of a dense model."""
        return self.active_layer_weights + self.num_root_parameters

    def flops(self, lora: LoraConfig) -> ModelFlops:
        """The operations of the model's passes, with these adapters if there are any."""
        adapters = self.adapter_parameters(lora.rank, lora.target_modules) if lora.learns else 0
        return ModelFlops(
            layer_weights=self.active_layer_weights,
            head_weights=self.vocab_size * self.hidden_size,
            attention=self.attention_flops,
            adapter_weights=adapters,
        )

    def weight_bytes(self, dtype: str) -> int:
        return self.num_parameters * BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.kv_width * BYTES[dtype]

    def shard_bytes(self, num_ranks: int) -> int:
        """The bytes of one float32 copy of all parameters on one rank: weights, gradients, either moment, or the
        reference.
        """
        return self.num_parameters * 4 // num_ranks

    def adapter_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """The parameters of low-rank adapters on these layers; no targets: on all."""
        return rank * sum(width for name, width in self.linear_widths.items() if not targets or name in targets)

    def working_bytes(
        self, dtype: str, num_tokens: int, *, checkpointing: bool = False, frozen: bool = False
    ) -> Working:
        """The most bytes of a rank, besides its state, during a forward and backward pass of a micro-batch.

        The largest of three moments: backward in the head (logits and their gradient), in a layer (recomputed with
        `checkpointing`), and at its end (the root's gradient). FSDP2 keeps the root gathered all the time, and reduces
        gradients in float32. `frozen`: gathered weights have no gradient.
        """
        width, learns = BYTES[dtype], not frozen
        layer = (self.num_parameters - self.num_root_parameters) // self.num_layers
        head = self.vocab_size * self.hidden_size * width
        root = self.num_root_parameters * width
        kept = num_tokens * self.kept_values(checkpointing) * width
        logits = num_tokens * (4 * self.hidden_size + 2 * self.vocab_size) * width
        pieces = LIVE_PIECES * 4 * min(CHUNK_LOGITS, num_tokens * self.vocab_size)
        again = num_tokens * self._layer_values * width if checkpointing else 0
        moments = (
            Working(gathered=root + learns * head, activations=kept + logits + pieces),
            Working(
                gathered=root + learns * head + 2 * layer * width + learns * layer * (width + 4),
                activations=kept + again,
            ),
            Working(gathered=root + learns * self.num_root_parameters * 4, activations=0),
        )
        return max(moments, key=lambda moment: moment.total)

    def kept_values(self, checkpointing: bool) -> int:
        """Values per token kept from forward to backward, in all layers; with checkpointing only their inputs."""
        return self.num_layers * (self.hidden_size if checkpointing else self._layer_values)

    @property
    def _layer_values(self) -> int:
        """Values per token in one Llama-like layer with fused attention: 9 per hidden unit, 5 per query and key unit, 4
        per unit of the MLP."""
        return 9 * self.hidden_size + 5 * (self.query_width + self.kv_width) + 4 * self.intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads, which tensor parallelism divides."""

    query: int
    key: int


def heads_of(path: str) -> Heads:
    """The heads of the model in a directory."""
    from transformers import AutoConfig  # late: seconds, which a checked run without GPUs does without

    text = AutoConfig.from_pretrained(path).get_text_config()
    return Heads(
        query=text.num_attention_heads, key=getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    )


def footprint_of(path: str) -> Footprint:
    """The footprint of the model in a directory. Raises OSError if there is no config at `path`."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    from models.lm.parallelize import decoder_layers

    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Not every architecture has these.
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    widths: dict[str, int] = {}
    for layer in decoder_layers(model):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                last = name.rpartition(".")[2]
                widths[last] = widths.get(last, 0) + module.in_features + module.out_features
    return Footprint(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_root_parameters=embedding.numel() + (0 if head is embedding else head.numel()),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        query_width=text.num_attention_heads * head_dim,
        kv_width=kv_heads * head_dim,
        vocab_size=text.vocab_size,
        linear_widths=widths,
        active_layer_weights=sum(active_weights(layer, text) for layer in decoder_layers(model)),
        attention_flops=attention_flops(text, text.num_attention_heads, head_dim),
    )


def active_weights(layer: nn.Module, config: PreTrainedConfig) -> int:
    """The weights of a layer's matrices, with only as many experts as a token is sent to. Experts are stacked in
    tensors of three dimensions, or are modules named by their number.
    """
    chosen: int = getattr(config, "num_experts_per_tok", 1)  # not every mixture calls it that
    found = 0
    for name, weights in layer.named_parameters():
        path = name.split(".")
        expert = path[path.index("experts") + 1] if "experts" in path else None
        if weights.dim() == 1:
            continue
        if expert is None:
            found += weights.numel()
        elif weights.dim() == 3:
            found += weights.numel() // len(weights) * chosen
        elif expert == "0":
            found += weights.numel() * chosen
    return found


def attention_flops(config: PreTrainedConfig, num_heads: int, head_dim: int) -> dict[int, int]:
    """Window -> operations for each pair of query and key, over the layers with this window. Layers that attend
    otherwise (linear attention) have none.
    """
    # Not every architecture has these.
    queries: int = getattr(config, "qk_head_dim", None) or head_dim
    values: int = getattr(config, "v_head_dim", None) or head_dim
    window: int = getattr(config, "sliding_window", None) or FULL
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    found: dict[int, int] = {}
    for kind in kinds:
        if kind in ("full_attention", "sliding_attention"):
            seen = FULL if kind == "full_attention" else window
            found[seen] = found.get(seen, 0) + 2 * num_heads * (queries + values)
    return found


def footprint_of_shape(shape: ModelShape) -> Footprint:
    """The footprint of a configured shape: a decoder with a gated MLP, or a mixture of them with a router, and without
    biases (Llama, Qwen, Mistral).
    """
    query_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = 2 * shape.hidden_size * (query_width + kv_width)
    expert = 3 * shape.hidden_size * (shape.moe_intermediate_size or shape.intermediate_size)
    router = shape.num_experts * shape.hidden_size
    layer = attention + router + max(1, shape.num_experts) * expert
    active = attention + router + max(1, shape.experts_per_token) * expert
    norms = 2 * shape.hidden_size
    root = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    beside = {
        **dict.fromkeys(("q_proj", "o_proj"), query_width),
        **dict.fromkeys(("k_proj", "v_proj"), kv_width),
        # Experts are no linear layers: they get no adapters.
        **({} if shape.num_experts else dict.fromkeys(("gate_proj", "up_proj", "down_proj"), shape.intermediate_size)),
    }
    return Footprint(
        num_parameters=root + shape.num_layers * (layer + norms) + shape.hidden_size,
        num_root_parameters=root,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        query_width=query_width,
        kv_width=kv_width,
        vocab_size=shape.vocab_size,
        linear_widths={name: shape.num_layers * (shape.hidden_size + width) for name, width in beside.items()},
        active_layer_weights=shape.num_layers * active,
        attention_flops={FULL: 4 * shape.num_layers * query_width},
    )
