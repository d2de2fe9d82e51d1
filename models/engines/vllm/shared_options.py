"""Two models on one vLLM engine: what they must have in common, which options serve both. Pure, except for
`read_shape`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from transformers import AutoConfig

from grmpipe.models.settings import VllmConfig

# Keys of config.json that don't affect an engine. The tokens that end a turn come with each request.
IRRELEVANT = frozenset({
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "initializer_range",
    "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip
WIDER = ("max_batch_rows", "max_context_tokens", "kv_cache_mb", "gpu_memory_utilization", "cpu_threads")
ZERO_IS_ALL = ("max_context_tokens", "kv_cache_mb")
UNUSED = ("sleep_mode",)  # an engine that swaps its weights doesn't sleep


def read_shape(path: str) -> dict[str, Any]:
    """A model's config.json with its defaults: layers, widths, window, quantization."""
    config: dict[str, Any] = AutoConfig.from_pretrained(path).to_dict()
    return config


def different_shapes(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What an engine made for one model lacks for the other, such as `hidden_size (96, 128)`; empty: only weights
    differ.
    """
    flat, other_flat = dict(_flat(one)), dict(_flat(other))
    return [
        f"{key} ({flat.get(key)}, {other_flat.get(key)})"
        for key in sorted(flat.keys() | other_flat.keys())
        if flat.get(key) != other_flat.get(key)
    ]


def different_options(one: VllmConfig, other: VllmConfig) -> list[str]:
    """Options for which no single value serves both roles."""
    return [
        f"{spec.name} ({getattr(one, spec.name)}, {getattr(other, spec.name)})"
        for spec in fields(VllmConfig)
        if spec.name not in (*WIDER, *UNUSED) and getattr(one, spec.name) != getattr(other, spec.name)
    ]


def wider_options(one: VllmConfig, other: VllmConfig) -> VllmConfig:
    """The options of an engine that serves both."""
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in WIDER}
    wider: dict[str, Any] = {}
    for name, pair in pairs.items():
        values = [value for value in pair if value is not None]
        wider[name] = 0 if name in ZERO_IS_ALL and 0 in values else max(values, default=None)
    return replace(one, **(wider | dict.fromkeys(UNUSED, False)))


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        if key in IRRELEVANT:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
