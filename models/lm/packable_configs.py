"""Whether the samples of a model can be packed, as far as its config shows. Imports neither torch nor transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from grmpipe.models.model_files import PlainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ATTENTIONS = ("full_attention", "sliding_attention")
# Settings that limit the keys of a query further, only in the mask or the kernel.
SPARSE = ("attention_chunk_size", "index_topk", "index_topk_blocks", "keep_window_size", "attn_logit_softcapping")
WINDOW_IN_MASK_ALONE = ("phimoe", "qwen2_moe")
LAYERS_KEEP_OPTIONS = ("moshi", "nemotron", "stablelm")  # models whose attention isn't passed the packing


def is_known_to_pack(directory: str) -> bool:
    """Whether a model is of a plain family and its config hides no key from a query, so that its layers need no
    check.
    """
    config = PlainConfig.read(directory)
    return config is not None and unpackable_config(SimpleNamespace(**config.values)) is None


def unpackable_config(config: PreTrainedConfig | SimpleNamespace) -> str | None:
    """Why samples of such a model can't be packed. None if its config gives no reason."""
    kind = config.model_type
    others = sorted({str(one) for one in getattr(config, "layer_types", None) or ()} - {*ATTENTIONS})
    if others:
        return f"{kind!r} models have layers of {', '.join(others)}, through which packed samples leak"
    for key in SPARSE:
        if getattr(config, key, None) is not None:
            return f"packed attention has no {key} ({getattr(config, key)} in its config.json)"
    if kind in LAYERS_KEEP_OPTIONS:
        return f"the layers of {kind!r} models don't pass the ends of packed samples to their attention"
    if kind in WINDOW_IN_MASK_ALONE and window_of_layers(config) is not None:
        return f"{kind!r} models don't pass their sliding_window to packed attention"
    return None


def window_of_layers(config: PreTrainedConfig | SimpleNamespace) -> int | None:
    """The window of the layers that have one. None if no layer hides a token of the model's context."""
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ("sliding_attention",))
    return window if slides and window is not None and window < config.max_position_embeddings else None
