"""Causal attention within packed samples, as transformers calls it.

T: packed tokens, H: query heads, G: key heads, D: head size, N, Q, K: as in models/lm/packing.py.
"""

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grmpipe.models.lm.packing import Packing, PaddedRows
from grmpipe.models.lm.parallel.context_parallel import ContextRanks

PACKED_ATTENTION = "packed_sdpa"
VARLEN_KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 doesn't


# Its calls depend on the samples' lengths: what is compiled of a layer ends before it and goes on behind it.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[1, H, T, D] in, [1, T, H, D] out. Each query sees its sample's prefix, and the sample's own tokens up to itself.

    If ranks share samples, T are the tokens of this rank's slice.

    Without a `packing` this is transformers' SDPA, so the model also works without packing.
    """
    if packing is None:
        if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
            raise ValueError(f"path: {type(module).__name__} doesn't pass the ends of packed samples to its attention")
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for unsupported in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(unsupported) is not None:
            raise ValueError(f"path: packed attention has no {unsupported}, which {type(module).__name__} needs")
    if sliding_window is None and _slides(module):
        raise ValueError(f"path: {type(module).__name__} doesn't pass its sliding_window to packed attention")
    query_THD, key_TGD, value_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    if packing.context is None:
        return _attend(query_THD, key_TGD, value_TGD, packing, scaling, sliding_window)[None], None
    states = _of_all_tokens(query_THD, key_TGD, value_TGD, packing, packing.context)
    out_THD = _attend(*states, packing, scaling, sliding_window)
    return packing.context.with_all_heads(out_THD)[None], None


def _of_all_tokens(
    query_PHD: Tensor, key_PGD: Tensor, value_PGD: Tensor, packing: Packing, context: ContextRanks
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a rank's tokens -> those of all tokens, of its share of the heads."""
    num_heads = query_PHD.shape[1]
    if num_heads % context.size:
        raise ValueError(
            f"cp: {context.size} ranks can't divide {num_heads} query heads evenly; type a divisor of them"
        )
    key_PGD, value_PGD = context.for_each_rank(key_PGD), context.for_each_rank(value_PGD)
    query_THD, key_TGD, value_TGD = (
        context.with_all_tokens(x, packing.num_tokens) for x in (query_PHD, key_PGD, value_PGD)
    )
    return query_THD, key_TGD, value_TGD


def _attend(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    varlen = on_gpu(query_THD) and query_THD.dtype in (torch.bfloat16, torch.float16)
    attend = _varlen if varlen else _padded
    return attend(query_THD, key_TGD, value_TGD, packing, scaling, window)


def _slides(module: nn.Module) -> bool:
    """Whether the layer's window hides some of the model's context, by its config."""
    # All of transformers' attention modules have these.
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    window = getattr(config, "sliding_window", None)
    if config is None or window is None or layer is None or window >= config.max_position_embeddings:
        return False
    layer_types = getattr(config, "layer_types", None)
    return layer_types is None or layer_types[layer] == "sliding_attention"


def _varlen(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """Flash attention over the packed tokens in place. If a sample has more keys than queries, causal masks and windows
    are aligned at the last query and key.
    """
    keys = packing.keys
    if keys.places_K is not None:
        # Its backward pass is index_add; that of key[places] sorts all places.
        key_TGD, value_TGD = (x.index_select(0, keys.places_K) for x in (key_TGD, value_TGD))
    grouped = query_THD.shape[1] != key_TGD.shape[1]
    if grouped and not VARLEN_KNOWS_GROUPS:
        key_TGD, value_TGD = (_to_every_head(x, query_THD.shape[1]) for x in (key_TGD, value_TGD))
    attend = functools.partial(varlen_attn, enable_gqa=True) if grouped and VARLEN_KNOWS_GROUPS else varlen_attn
    out = attend(
        query_THD.contiguous(),
        key_TGD.contiguous(),
        value_TGD.contiguous(),
        keys.query_starts_S1,
        keys.starts_S1,
        keys.max_queries,
        keys.max_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
    )
    assert isinstance(out, Tensor)
    return out


def _padded(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """SDPA on padded copies, of samples of about the same length at a time.

    On a GPU each query head gets its own copy of the keys: no fused kernel for float32 supports groups, and the unfused
    one holds the scores of all heads, gigabytes per layer.
    """
    num_heads = query_THD.shape[1]
    if on_gpu(query_THD):
        key_TGD, value_TGD = (_to_every_head(x, num_heads) for x in (key_TGD, value_TGD))

    def attend(rows: PaddedRows) -> Tensor:
        seen_NQK = rows.make_mask(window)
        out_NHQD = F.scaled_dot_product_attention(
            query_THD[rows.queries_NQ].transpose(1, 2),
            key_TGD[rows.keys_NK].transpose(1, 2),
            value_TGD[rows.keys_NK].transpose(1, 2),
            attn_mask=None if seen_NQK is None else seen_NQK[:, None],
            is_causal=seen_NQK is None,
            scale=scaling,
            enable_gqa=num_heads != key_TGD.shape[1],
        )
        return out_NHQD.transpose(1, 2).flatten(0, 1)

    return torch.cat([attend(rows) for rows in packing.rows])[packing.slots_T]


def on_gpu(states: Tensor) -> bool:
    return states.is_cuda


def _to_every_head(states_TGD: Tensor, num_heads: int) -> Tensor:
    """[T, H, D]: keys or values of a group, for each of its query heads."""
    return states_TGD.repeat_interleave(num_heads // states_TGD.shape[1], dim=1)


AttentionInterface.register(PACKED_ATTENTION, attend_packed)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
