"""Exports a trained model as a Hugging Face directory that engines can serve."""

import shutil
from pathlib import Path
from typing import Protocol

from grmpipe.models.settings import ModelConfig


class Exports(Protocol):
    """The ranks of a trained model."""

    async def export(self, path: str) -> None: ...


async def export(ranks: Exports, directory: Path, model: ModelConfig) -> None:
    """Write weights, configuration, tokenizer, and the chat template that the model was trained under."""
    await ranks.export(str(directory))
    if model.chat_template:
        shutil.copyfile(model.chat_template, directory / "chat_template.jinja")
