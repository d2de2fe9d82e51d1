"""How large a model is, from its config alone: parameters, weights, KV cache, activations. Loads no weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Sizes of one copy of a model."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    kv_width: int  # key heads x head dim

    def weight_bytes(self, dtype: str) -> int:
        return self.num_parameters * BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.num_layers * self.kv_width * BYTES[dtype]

    def activation_bytes_per_token(self, dtype: str) -> int:
        """34 bytes per layer and hidden unit at 2 bytes a value (arXiv 2205.05198, eq. 2, less the attention map)."""
        return 17 * self.num_layers * self.hidden_size * BYTES[dtype]


def footprint_of(path: str) -> Footprint:
    """Raises OSError when there is no config at `path`."""
    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads  # not every architecture names it
    return Footprint(
        num_parameters=num_parameters,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
    )
