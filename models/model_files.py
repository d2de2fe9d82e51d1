"""Reads the small JSON files of a model directory. Imports no library of models: transformers takes seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

HASHED_PLACES, HASHED_BYTES = 64, 4096  # of each weight file
TOKENIZER_CLASS = "TokenizersBackend"  # as transformers 5 saves tokenizers; it needs no class of the family
# Decoders whose config.json can be read directly: without defaults, aliases or nested configs. Their layers are full or
# sliding attention, so their samples can be packed.
PLAIN_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """The config.json of one of PLAIN_FAMILIES."""

    values: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def read(directory: str) -> PlainConfig | None:
        """None if transformers must read it: for a hub name, and for missing or broken files."""
        values = read_json(directory, "config.json")
        plain = values.get("model_type") in PLAIN_FAMILIES and "auto_map" not in values
        complete = all(isinstance(values.get(key), int) for key in ("max_position_embeddings", "vocab_size"))
        return PlainConfig(values) if plain and complete else None

    @property
    def context_tokens(self) -> int:
        return int(self.values["max_position_embeddings"])

    @property
    def vocab_size(self) -> int:
        return int(self.values["vocab_size"])


def is_plain_tokenizer(directory: str) -> bool:
    """Whether the tokenizer can be loaded without looking up its family's class."""
    values = read_json(directory, "tokenizer_config.json")
    saved = Path(directory, "tokenizer.json").is_file()
    return saved and values.get("tokenizer_class") == TOKENIZER_CLASS and "auto_map" not in values


def hash_weights(directory: str) -> str:
    """A hash of samples from all over a model's weight files, which may be hundreds of gigabytes; empty: none there."""
    digest, files = xxhash.xxh3_64(), sorted(Path(directory).glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as opened:
            for place in range(HASHED_PLACES):
                opened.seek(size * place // HASHED_PLACES)
                digest.update(opened.read(HASHED_BYTES))
    return digest.hexdigest() if files else ""


def read_json(directory: str, name: str) -> Mapping[str, Any]:
    """The JSON object in a file. Empty if there is no such file, or it holds something else."""
    try:
        values = json.loads(Path(directory, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
