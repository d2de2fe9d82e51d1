"""A decoder for models like Llama and Qwen, with fused projections and few calls per layer. Shares the module's
weights.

B: rows that decode, W: tokens of each, P: packed tokens, C: hidden, H: query heads, G: KV heads, R: query heads of a
KV head, D: head, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from grmpipe.models.engines.embedded.kv_slots import KvSlots
from grmpipe.models.engines.embedded.prompt_packing import PackedPrompts
from grmpipe.models.engines.engine_memory import LEAST_PACKED, MOST_PACKED
from grmpipe.models.lm.lora import find_adapter, list_names

FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
FEW_ROWS, PACKED_ROWS = range(2, 65), 16  # for which packed weights are faster, and for which they are arranged
# Their angles depend only on the position; those of "dynamic" and "longrope" also on the length.
Ids = Sequence[int]
Names = Sequence[str]
ROW_BLOCK = 8  # rows whose products add in one order, however many there are: see batch_invariance.py
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of several linear layers on one input, as one. R: their ranks together, O: outputs of all layers."""

    a_RC: Tensor
    b_OR: Tensor  # block-diagonal: an adapter's columns, its layer's rows
    scale: float

    @staticmethod
    def by_name(*modules: Any) -> dict[str, Adapters]:
        """The adapters of these layers by name; none for plain layers."""
        names = dict.fromkeys(name for module in modules for name in list_names(module))
        return {name: Adapters.of(name, *modules) for name in names}

    @staticmethod
    def of(name: str, *modules: Any) -> Adapters:
        outputs = [len(module.weight) for module in modules]
        found = [(sum(outputs[:i]), low) for i, module in enumerate(modules) if (low := find_adapter(module, name))]
        a_RC = share_storage([low_rank.a_RI for _, low_rank in found])
        b_OR = a_RC.new_zeros(sum(outputs), len(a_RC))
        column = 0
        for row, low_rank in found:
            height, width = low_rank.b_OR.shape
            block = b_OR[row : row + height, column : column + width]
            block.copy_(low_rank.b_OR.data)
            low_rank.b_OR.data = block
            column += width
        return Adapters(a_RC=a_RC, b_OR=b_OR, scale=found[0][1].scale)


@dataclass(slots=True)
class TokenAdapters:
    """The adapters of the tokens of the pass under way. by_name: adapter -> its places; None: all tokens have it."""

    by_name: Mapping[str, Tensor | slice | None] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Linear:
    """packed: the weight as oneDNN reads it. The usual product arranges the whole weight anew in every call, which
    takes as long as multiplying it with a few rows.
    adapters: by name; `chosen` says which tokens have which.
    """

    weight: Tensor
    bias: Tensor | None
    adapters: Mapping[str, Adapters]
    chosen: TokenAdapters
    packed: Tensor | None = None

    @staticmethod
    def of(chosen: TokenAdapters, *modules: Any) -> Linear:
        """Several linear layers on one input, as one."""
        biases = [module.bias for module in modules if module.bias is not None]
        assert len(biases) in (0, len(modules))
        adapters = Adapters.by_name(*modules)
        weight = share_storage([module.weight for module in modules])
        bias = share_storage(biases) if biases else None
        return Linear(weight=weight, bias=bias, adapters=adapters, chosen=chosen)

    def pack(self) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_ROWS)

    def __call__(self, x_PC: Tensor) -> Tensor:
        if self.packed is not None and len(x_PC) in FEW_ROWS:
            out_PO = multiply_packed(x_PC, self.packed, self.bias)
        else:
            out_PO = F.linear(x_PC, self.weight, self.bias)
        for name, places in self.chosen.by_name.items():
            if (beside := self.adapters.get(name)) is None:
                continue
            of_PC, to_PO = (x_PC, out_PO) if places is None else (x_PC[places], out_PO[places])
            to_PO.addmm_(F.linear(of_PC, beside.a_RC), beside.b_OR.t(), alpha=beside.scale)
            if isinstance(places, Tensor):  # a slice is no copy
                out_PO.index_copy_(0, places, to_PO)
        return out_PO


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    weight: Tensor
    epsilon: float

    @staticmethod
    def of(module: Any) -> Norm:
        return Norm(weight=module.weight.data, epsilon=module.variance_epsilon)

    def __call__(self, x_PC: Tensor) -> Tensor:
        return F.rms_norm(x_PC, x_PC.shape[-1:], self.weight, self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """Qwen3's norms of queries and keys in one call. Row 0 of the weight is for queries, row 1 for keys."""

    weight_2D: Tensor
    kind_of_head: Tensor  # [H + G] of 0 and 1
    epsilon: float

    @staticmethod
    def of(attention: Any, num_heads: int, num_kv_heads: int) -> HeadNorm | None:
        if not hasattr(attention, "q_norm"):  # Llama has none
            return None
        weight = share_storage([attention.q_norm.weight, attention.k_norm.weight])
        kinds = torch.tensor([0] * num_heads + [1] * num_kv_heads, device=weight.device)
        return HeadNorm(weight_2D=weight.view(2, -1), kind_of_head=kinds, epsilon=attention.q_norm.variance_epsilon)

    def __call__(self, heads_PHD: Tensor) -> Tensor:
        normed_PHD = F.rms_norm(heads_PHD, heads_PHD.shape[-1:], None, self.epsilon)
        return normed_PHD * self.weight_2D[self.kind_of_head]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    before_attention: Norm
    qkv: Linear
    head_norm: HeadNorm | None
    out: Linear
    before_mlp: Norm
    gate_up: Linear
    down: Linear

    @staticmethod
    def of(layer: Any, num_heads: int, num_kv_heads: int, chosen: TokenAdapters) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return Layer(
            before_attention=Norm.of(layer.input_layernorm),
            qkv=Linear.of(chosen, attention.q_proj, attention.k_proj, attention.v_proj),
            head_norm=HeadNorm.of(attention, num_heads, num_kv_heads),
            out=Linear.of(chosen, attention.o_proj),
            before_mlp=Norm.of(layer.post_attention_layernorm),
            gate_up=Linear.of(chosen, mlp.gate_proj, mlp.up_proj),
            down=Linear.of(chosen, mlp.down_proj),
        )

    def mlp(self, x_PC: Tensor) -> Tensor:
        gate, up = self.gate_up(self.before_mlp(x_PC)).chunk(2, -1)
        return x_PC + self.down(F.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True, kw_only=True)
class Angles:
    """Rotary angles (arXiv 2104.09864) by position. The first half of the sine is negated, so that rotating is a
    roll.
    """

    cos_TD: Tensor
    sin_TD: Tensor

    @staticmethod
    def of(rotary: nn.Module, num_positions: int, dtype: torch.dtype, device: torch.device) -> Angles:
        positions_1T = torch.arange(num_positions, device=device)[None]
        cos_1TD, sin_1TD = rotary(torch.empty(0, dtype=dtype, device=device), positions_1T)
        half = sin_1TD.shape[-1] // 2
        return Angles(cos_TD=cos_1TD[0], sin_TD=torch.cat([-sin_1TD[0, :, :half], sin_1TD[0, :, half:]], -1))

    def at(self, positions_P: Tensor) -> Angles:
        """The angles of one position per token, broadcast over its heads."""
        return Angles(cos_TD=self.cos_TD[positions_P][:, None], sin_TD=self.sin_TD[positions_P][:, None])

    def rotate(self, heads_PHD: Tensor) -> Tensor:
        rolled_PHD = heads_PHD.roll(heads_PHD.shape[-1] // 2, -1)
        return torch.addcmul(heads_PHD * self.cos_TD, rolled_PHD, self.sin_TD)


class FusedDecoder:
    """A Decoder for models that `supports` accepts.

    The module's parameters are slices of the fused weights, so loading the parameters loads these.
    """

    row_block = 1

    def __init__(self, model: PreTrainedModel, slots: KvSlots) -> None:
        self._slots = slots
        self._num_heads, self._num_kv_heads = model.config.num_attention_heads, slots.shape.num_kv_heads
        trunk: Any = model.model
        self._rotary = trunk.rotary_emb
        self._angles = Angles.of(self._rotary, 1, slots.shape.dtype, slots.shape.device)
        self._embedding = trunk.embed_tokens.weight.data
        self._chosen = TokenAdapters()
        heads = self._num_heads, self._num_kv_heads
        self._layers = [Layer.of(layer, *heads, self._chosen) for layer in trunk.layers]
        self._norm = Norm.of(trunk.norm)
        head: Any = model.lm_head
        self._head = Linear(weight=head.weight.data, bias=None, adapters={}, chosen=self._chosen)
        blocks = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in self._layers]
        self._linears = (self._head, *chain.from_iterable(blocks))
        self._packs = packs(slots.shape.device, slots.shape.dtype)
        self._packed = True  # until `weights_changed`: what must be the same in any batch packs nothing

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        if type(model) not in FAMILY:
            return False
        rotary: Any = model.model.rotary_emb
        return rotary.rope_type in ROPE_TYPES and model.config.hidden_act == "silu"

    def prefill(self, prompts: Sequence[Ids], rows: Ids, starts: Ids = (), adapters: Names = ()) -> None:
        self._chosen.by_name = find_stretches([len(prompt) for prompt in prompts], adapters)
        packed = PackedPrompts.of(prompts, rows, self._slots.tokens_per_row, self._slots.shape.device, starts)
        angles = self._angles_at(packed.positions_P)
        x_PC = F.embedding(packed.token_ids_P, self._embedding)
        for index, layer in enumerate(self._layers[:-1]):
            x_PC = x_PC + layer.out(self._attend_prompts(packed, index, self._rotated_qkv(layer, x_PC, angles)))
            x_PC = layer.mlp(x_PC)
        # The last layer's output for a prompt isn't used: only its keys and values are needed.
        qkv_PC = self._rotated_qkv(self._layers[-1], x_PC, angles)
        self._slots.write(len(self._layers) - 1, packed.places_P, self._keys_and_values(qkv_PC))

    def weights_changed(self) -> None:
        for linear in self._linears:
            linear.packed = None
        self._packed = not self._packs

    def decode(self, token_ids_B: Tensor, positions_B: Tensor, num_attended: int, adapters: Names = ()) -> Tensor:
        return self.verify(token_ids_B[:, None], positions_B[:, None], num_attended, adapters)[:, 0]

    def verify(self, token_ids_BQ: Tensor, positions_BQ: Tensor, num_attended: int, adapters: Names = ()) -> Tensor:
        names = [name for name in adapters for _ in range(token_ids_BQ.shape[1])]
        self._chosen.by_name = find_places(names, self._slots.shape.device)
        if not self._packed:  # not before they are needed: a push has many buckets
            self._pack()
        num_rows, width = token_ids_BQ.shape
        x_PC = self._feed(token_ids_BQ.flatten(), positions_BQ.flatten(), slice(num_rows), num_attended, width)
        logits_RWV: Tensor = self._head(self._norm(x_PC)).unflatten(0, (num_rows, width))
        return logits_RWV

    def feed(self, token_ids_P: Tensor, positions_P: Tensor, row: int, num_attended: int, adapter: str = "") -> None:
        self._chosen.by_name = {adapter: None}
        self._feed(token_ids_P, positions_P, slice(row, row + 1), num_attended)

    def _feed(self, token_ids_P: Tensor, positions_P: Tensor, rows: slice, num_attended: int, width: int = 1) -> Tensor:
        """Feed `width` tokens to each of these rows, or all tokens to a single one. Returns the last hidden states."""
        slots, num_calls = self._slots, len(token_ids_P) // width
        angles = self._angles_at(positions_P)
        rows_B = torch.arange(rows.start or 0, rows.stop, device=token_ids_P.device)
        places_P = rows_B.repeat_interleave(width) * slots.tokens_per_row + positions_P
        seen_PT = torch.arange(num_attended, device=token_ids_P.device) <= positions_P[:, None]
        mask_PT = torch.where(seen_PT, 0.0, -torch.inf).to(slots.shape.dtype)
        mask_B1QT = mask_PT.unflatten(0, (num_calls, 1, width))
        if width > 1:
            mask_B1QT = mask_B1QT.repeat_interleave(self._num_heads // self._num_kv_heads, 2)

        def attend(index: int, qkv_PC: Tensor) -> Tensor:
            slots.write(index, places_P, self._keys_and_values(qkv_PC))
            keys_BGTD, values_BGTD = slots.read(index, rows, num_attended)
            if len(keys_BGTD) < num_calls:
                keys_BGTD, values_BGTD = (x.expand(num_calls, -1, -1, -1) for x in (keys_BGTD, values_BGTD))
            # The query heads of a KV head are further query positions: no key or value is repeated.
            heads_BWGRD = self._queries(qkv_PC).unflatten(1, (self._num_kv_heads, -1)).unflatten(0, (-1, width))
            query_BGQD = heads_BWGRD.transpose(1, 2).flatten(2, 3)
            out_BGQD = F.scaled_dot_product_attention(query_BGQD, keys_BGTD, values_BGTD, attn_mask=mask_B1QT)
            out_PC: Tensor = out_BGQD.unflatten(2, (width, -1)).transpose(1, 2).flatten(2).flatten(0, 1)
            return out_PC

        x_PC = F.embedding(token_ids_P, self._embedding)
        for index, layer in enumerate(self._layers):
            x_PC = x_PC + layer.out(attend(index, self._rotated_qkv(layer, x_PC, angles)))
            x_PC = layer.mlp(x_PC)
        return x_PC

    def _pack(self) -> None:
        left = MOST_PACKED
        for linear in self._linears:
            num_bytes = linear.weight.nbytes
            if LEAST_PACKED <= num_bytes <= left:
                linear.pack()
                left -= num_bytes
        self._packed = True

    def _rotated_qkv(self, layer: Layer, x_PC: Tensor, angles: Angles) -> Tensor:
        qkv_PC = layer.qkv(layer.before_attention(x_PC))
        heads_PHD = qkv_PC.unflatten(1, (self._num_heads + 2 * self._num_kv_heads, -1))[:, : -self._num_kv_heads]
        normed_PHD = heads_PHD if layer.head_norm is None else layer.head_norm(heads_PHD)
        heads_PHD.copy_(angles.rotate(normed_PHD))
        return qkv_PC

    def _queries(self, qkv_PC: Tensor) -> Tensor:
        q_PHD: Tensor = qkv_PC.unflatten(1, (self._num_heads + 2 * self._num_kv_heads, -1))[:, : self._num_heads]
        return q_PHD

    def _keys_and_values(self, qkv_PC: Tensor) -> Tensor:
        return qkv_PC[:, self._num_heads * self._slots.shape.head_dim :]

    def _attend_prompts(self, packed: PackedPrompts, index: int, qkv_PC: Tensor) -> Tensor:
        self._slots.write(index, packed.places_P, self._keys_and_values(qkv_PC))
        keys_NGTD, values_NGTD = self._slots.read(index, packed.rows_N, packed.num_attended)
        out_NHTD = F.scaled_dot_product_attention(
            packed.pad(self._queries(qkv_PC)).transpose(1, 2),
            keys_NGTD,
            values_NGTD,
            attn_mask=packed.seen_N1QT,
            is_causal=packed.seen_N1QT is None,
            enable_gqa=self._num_heads != self._num_kv_heads,
        )
        return packed.unpad(out_NHTD.transpose(1, 2)).flatten(1)

    def _angles_at(self, positions_P: Tensor) -> Angles:
        if len(self._angles.cos_TD) < self._slots.tokens_per_row:
            shape = self._slots.shape
            self._angles = Angles.of(self._rotary, self._slots.tokens_per_row, shape.dtype, shape.device)
        return self._angles.at(positions_P)


def find_stretches(lengths: Ids, names: Names) -> Mapping[str, slice | None]:
    """Adapter -> the tokens of its prompts, which follow each other; None if all are its own."""
    ends = list(accumulate(lengths))
    found = dict.fromkeys(names)
    if len(found) <= 1:
        return dict.fromkeys(found)
    own = {name: [place for place, one in enumerate(names) if one == name] for name in found}
    assert all(some[-1] - some[0] + 1 == len(some) for some in own.values()), "prompts come by adapter"
    return {name: slice(ends[some[0]] - lengths[some[0]], ends[some[-1]]) for name, some in own.items()}


def find_places(names: Sequence[str], device: torch.device) -> Mapping[str, Tensor | None]:
    """Adapter -> the places of its tokens, in whole blocks, so that their products add in the order of `ROW_BLOCK`s:
    the last place is repeated. None where all have the same one; no names: none has any.
    """
    if len(found := dict.fromkeys(names)) <= 1:
        return dict.fromkeys(found)
    places: dict[str, list[int]] = {name: [] for name in found}
    for place, name in enumerate(names):
        places[name].append(place)
    whole = {name: [*some, *some[-1:] * (-len(some) % ROW_BLOCK)] for name, some in places.items()}
    return {name: torch.tensor(some, device=device) for name, some in whole.items()}


def multiply_packed(x_PC: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Like F.linear, of a packed weight."""
    out_PO: Tensor = torch.ops.mkldnn._linear_pointwise(x_PC, packed, bias, "none", [], "")
    return out_PO


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's products of packed weights are known to be faster."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX512"


def share_storage(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor, of which the parameters become slices: the memory exists once, and loading them loads it."""
    shared = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, shared.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return shared
