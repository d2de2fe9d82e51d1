"""The memory of a model, from its sizes: weights, KV cache, learner, activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grmpipe.models.lm.flops import FULL, ModelFlops
from grmpipe.models.model_files import PlainConfig
from grmpipe.models.settings import CHUNK_LOGITS, KEEP_ALL, Activations, LoraConfig, ModelShape

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

# Bytes per logit of a chunk in the backward pass: as computed, as float32, its gradient twice.
BYTES_PER_CHUNK_LOGIT = {"float32": 16, "bfloat16": 14, "float16": 14}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHAPE_IN_CONFIG = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}
# Dense families -> weights of a layer besides those of its matrices and its two norms.
VECTORS_OF_LAYER: dict[str, Callable[[ModelShape], int]] = {
    "llama": lambda shape: 0,
    "mistral": lambda shape: 0,
    "qwen2": lambda shape: (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim,  # biases of q, k and v
    "qwen3": lambda shape: 2 * shape.head_dim,  # norms of queries and keys
}
NUM_VECTORS = {"qwen2": 3, "qwen3": 2}  # the tensors that these weights are
BYTES_OF_ADAM = 8  # two moments of a trained value, in float32


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
    """The sizes of one copy of a decoder.

    num_root_parameters: the embedding and the output head, outside of all layers. intermediate_size: the width of a
    feed-forward layer as one token passes it: in a mixture, all its experts together. linear_widths,
    linear_weights: name of the blocks' linear layers -> sum of inputs and outputs, and weights, over all blocks.
    active_layer_weights: weights of the layers' matrices, with only as many experts as a token is sent to.
    num_expert_parameters: the experts of all layers. experts_per_token: how many a token is sent to. Both are 0 in a
    dense model. num_tensors: without those of experts, of which a checkpoint has num_expert_tensors, each expert's by
    itself. attention_flops: as in ModelFlops. whole_logits: its forward pass changes the output of its head, so
    all logits exist at once.
    """

    num_parameters: int
    num_root_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    query_width: int  # query heads x head dim
    kv_width: int  # key heads x head dim
    num_key_heads: int
    vocab_size: int
    linear_widths: Mapping[str, int]
    linear_weights: Mapping[str, int]
    active_layer_weights: int
    attention_flops: Mapping[int, int]
    num_expert_parameters: int = 0
    experts_per_token: int = 0
    num_tensors: int = 0
    num_expert_tensors: int = 0
    whole_logits: bool = False

    @property
    def matrix_weights(self) -> int:
        """The weights of the matrices that multiply a token: of the layers, of the experts it is sent to, of the output
        head.
        """
        return self.active_layer_weights + self.vocab_size * self.hidden_size

    def flops(self, lora: LoraConfig) -> ModelFlops:
        """The operations of the model's passes, with these adapters if there are any."""
        adapters = self.adapter_parameters(lora.rank, lora.target_modules) if lora.learns else 0
        return ModelFlops(
            layer_weights=self.active_layer_weights,
            head_weights=self.vocab_size * self.hidden_size,
            attention=self.attention_flops,
            adapter_weights=adapters,
        )

    def weight_bytes(self, dtype: str, bytes_in_layers: int | None = None) -> int:
        """The bytes of all weights; bytes_in_layers: per weight outside of embedding and head, if rounded."""
        width = BYTES[dtype]
        in_layers = self.num_parameters - self.num_root_parameters
        return self.num_root_parameters * width + in_layers * (bytes_in_layers or width)

    def kv_bytes_per_token(self, dtype: str, num_gpus: int = 1) -> int:
        """The bytes of a token's keys and values on all GPUs of an engine together. Each GPU has at least one key head:
        beyond the number of heads, more GPUs hold copies.
        """
        head_dim = self.kv_width // self.num_key_heads
        held = max(1, self.num_key_heads // num_gpus) * num_gpus * head_dim
        return 2 * self.num_layers * held * BYTES[dtype]

    def shard_bytes(self, num_ranks: int) -> int:
        """The bytes of one float32 copy of all parameters on one rank: weights, gradients, or either moment."""
        return self.num_parameters * 4 // num_ranks

    def adapter_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """The parameters of low-rank adapters on these layers; no targets: on all."""
        return rank * sum(width for name, width in self.linear_widths.items() if not targets or name in targets)

    def count_trained(self, lora: LoraConfig) -> int:
        """The values that learn: those of the adapters, or without any all parameters."""
        return self.adapter_parameters(lora.rank, lora.target_modules) if lora.learns else self.num_parameters

    def count_adapted_weights(self, targets: Sequence[str]) -> int:
        """The weights of the layers that get adapters; no targets: of all linear layers of the blocks."""
        return sum(weights for name, weights in self.linear_weights.items() if not targets or name in targets)

    def estimate_working_bytes(
        self,
        dtype: str,
        num_tokens: int,
        activations: Activations = KEEP_ALL,
        *,
        ranks: int = 1,
        ep: int = 1,
        frozen: bool = False,
    ) -> Working:
        """The most bytes of a rank, besides its state, during a forward and backward pass of a micro-batch.

        The largest of several moments. FSDP2 gathers a layer and prefetches the next one, and reduces gradients in
        float32; the float32 input of a reduction is freed when the next one begins. `ranks`: that share the weights;
        `ep`: that divide the experts of a layer. `frozen`: gathered weights have no gradient.
        """
        width, learns = BYTES[dtype], 0 if frozen else 1
        kept = num_tokens * self.kept_values(activations) * width
        # When the second layer from the end computes its gradients, the last one's activations are gone.
        kept_later = kept if activations.recomputes else kept - kept // self.num_layers
        end = self.vocab_size * self.hidden_size
        tied = 2 * end > self.num_root_parameters
        experts = self.num_expert_parameters // self.num_layers // ep
        layer = (self.num_parameters - self.num_root_parameters - self.num_expert_parameters) // self.num_layers
        layer += experts
        # Tied weights are gathered all the time, and the gradient of their use as head is held to the end.
        root = end * width * (1 + learns) if tied else 0
        reduced = width + 4 + 4 // ranks  # per gathered value, of a gradient on its way to its shards
        values = self._layer_values
        gradients = 2 * self.intermediate_size + self.experts_per_token * self.hidden_size
        in_layer = values + gradients if activations.recomputes else values // 4
        # In a mixture the gradients of all experts are there before those of attention.
        early = root + 2 * layer * width + learns * width * experts
        moments = (
            Working(gathered=end * width * (1 + learns), activations=kept + self._head_bytes(dtype, num_tokens)),
            Working(gathered=end * (width + learns * reduced), activations=0 if tied else kept),
            *(
                Working(gathered=early + learns * waiting, activations=held + num_tokens * in_layer * width)
                for waiting, held in ((0 if tied else 4 * end, kept), (4 * layer, kept_later))
            ),
            Working(gathered=root + layer * (2 * width + learns * reduced), activations=kept_later),
        )
        return max(moments, key=lambda moment: moment.total)

    def _head_bytes(self, dtype: str, num_tokens: int) -> int:
        """Bytes of activations in the backward pass of the output head."""
        width, num_logits = BYTES[dtype], num_tokens * self.vocab_size
        chunk = BYTES_PER_CHUNK_LOGIT[dtype] * min(CHUNK_LOGITS, num_logits)
        hidden = num_tokens * self.hidden_size * (4 * width + 4)  # the last norm, and gradients in float32
        return hidden + chunk + (2 * num_logits * width if self.whole_logits else 0)

    def kept_values(self, activations: Activations) -> int:
        """Values per token kept on the device from forward to backward, in all layers."""
        if not activations.recomputes:
            return self.values_per_token
        # An input that is offloaded is on the device while its layer computes.
        inputs = 2 if activations.offload else self.num_layers
        attention = self.num_layers * self.query_width if activations.checkpointing == "selective" else 0
        return inputs * self.hidden_size + attention

    @property
    def values_per_token(self) -> int:
        """The activations that a token has in all layers together."""
        return self.num_layers * self._layer_values

    @property
    def _layer_values(self) -> int:
        """Values per token in one Llama-like layer with fused attention: 9 per hidden unit, 5 per query and key unit, 4
        per unit of the MLP, and the rows into and out of each expert."""
        rows = 2 * self.experts_per_token * self.hidden_size
        return 9 * self.hidden_size + 5 * (self.query_width + self.kv_width) + 4 * self.intermediate_size + rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads, which tensor parallelism divides."""

    query: int
    key: int


def read_heads(path: str) -> Heads:
    """The heads of the model in a directory."""
    config = PlainConfig.read(path)
    query, key = (config.values.get(f"num_{kind}_heads") if config else None for kind in ("attention", "key_value"))
    if query and key:
        return Heads(query=query, key=key)
    from transformers import AutoConfig  # late: seconds, which the usual families do without

    text = AutoConfig.from_pretrained(path).get_text_config()
    return Heads(
        query=text.num_attention_heads, key=getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    )


def read_footprint(path: str) -> Footprint:
    """The footprint of the model in a directory. Raises OSError if there is no config at `path`."""
    config = PlainConfig.read(path)
    plain = read_plain_footprint(config) if config is not None else None
    return plain or measure_outline(path)


def read_plain_footprint(config: PlainConfig) -> Footprint | None:
    """The footprint of a dense model of a plain family. None if its config leaves a size to transformers."""
    values = config.values
    sizes: dict[str, Any] = {field: values.get(name) for field, name in SHAPE_IN_CONFIG.items()}
    tied, vectors = values.get("tie_word_embeddings"), VECTORS_OF_LAYER.get(values["model_type"])
    slides = values.get("sliding_window") is not None and set(values.get("layer_types") or "?") != {"full_attention"}
    biased = values.get("attention_bias") or values.get("mlp_bias")
    if vectors is None or slides or biased or not isinstance(tied, bool):
        return None
    if not all(isinstance(size, int) for size in sizes.values()):
        return None
    shape = ModelShape(**sizes, context_tokens=config.context_tokens, tied=tied)
    found = footprint_of_shape(shape)
    return replace(
        found,
        num_parameters=found.num_parameters + shape.num_layers * vectors(shape),
        num_tensors=found.num_tensors + shape.num_layers * NUM_VECTORS.get(values["model_type"], 0),
    )


def measure_outline(path: str) -> Footprint:
    """The footprint of any model, made without its numbers. Takes seconds, mostly of imports."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    from grmpipe.models.lm.causal_lm import ONE_LOAD_AT_A_TIME
    from grmpipe.models.lm.output_head import OutputHead, find_output_head
    from grmpipe.models.lm.parallelize import decoder_layers

    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    with ONE_LOAD_AT_A_TIME, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    find_output_head(model)
    # Not every architecture has these.
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    widths: dict[str, int] = {}
    weights: dict[str, int] = {}
    for layer in decoder_layers(model):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                last = name.rpartition(".")[2]
                widths[last] = widths.get(last, 0) + module.in_features + module.out_features
                weights[last] = weights.get(last, 0) + module.in_features * module.out_features
    num_expert_parameters = sum(p.numel() for name, p in model.named_parameters() if is_expert(name))
    return Footprint(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_root_parameters=embedding.numel() + (0 if head is embedding else head.numel()),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=_per_token_width(text),
        query_width=text.num_attention_heads * head_dim,
        kv_width=kv_heads * head_dim,
        num_key_heads=kv_heads,
        vocab_size=text.vocab_size,
        linear_widths=widths,
        linear_weights=weights,
        active_layer_weights=sum(active_weights(layer, text) for layer in decoder_layers(model)),
        attention_flops=attention_flops(text, text.num_attention_heads, head_dim),
        num_expert_parameters=num_expert_parameters,
        experts_per_token=getattr(text, "num_experts_per_tok", 1) if num_expert_parameters else 0,
        num_tensors=sum(not is_expert(name) for name, _ in model.named_parameters()),
        num_expert_tensors=sum(count_experts(name, p) for name, p in model.named_parameters() if is_expert(name)),
        whole_logits=not isinstance(model.get_output_embeddings(), OutputHead),
    )


def _per_token_width(config: PreTrainedConfig) -> int:
    """The inner units of a feed-forward layer that a token passes: in a mixture those of its experts."""
    each, chosen = getattr(config, "moe_intermediate_size", None), getattr(config, "num_experts_per_tok", None)
    if each and chosen:
        return int(each * chosen)
    return int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)


def is_expert(parameter: str) -> bool:
    """Whether a parameter of this name belongs to one expert, or to all experts of a layer."""
    return "experts" in parameter.split(".")


def count_experts(parameter: str, weights: Tensor) -> int:
    """The tensors in a checkpoint of a parameter of experts: one for each of them, two if it has two fused matrices."""
    if weights.dim() < 3:
        return 1
    return len(weights) * (2 if "gate_up" in parameter else 1)


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
        num_key_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        linear_widths={name: shape.num_layers * (shape.hidden_size + width) for name, width in beside.items()},
        linear_weights={name: shape.num_layers * shape.hidden_size * width for name, width in beside.items()},
        active_layer_weights=shape.num_layers * active,
        attention_flops={FULL: 4 * shape.num_layers * query_width},
        num_expert_parameters=shape.num_layers * shape.num_experts * expert,
        experts_per_token=shape.experts_per_token,
        # Attention and two norms; the MLP, or a router; the embedding, the last norm, the head.
        num_tensors=shape.num_layers * (6 + (1 if shape.num_experts else 3)) + (2 if shape.tied else 3),
        num_expert_tensors=shape.num_layers * shape.num_experts * 3,
    )
