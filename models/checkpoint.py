"""Checkpoints: sharded ones that any number of ranks can load, and Hugging Face directories. Knows no run.

What doesn't learn isn't saved: it is as it was loaded, and a run goes on from the same files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel

from models.checkpoint_metadata import SafeReader
from models.lora import merged_state, save_adapters
from models.settings import LoraConfig

COPIED_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja",
    "generation_config.json",
)  # fmt: skip


def save_sharded(directory: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer, version: int) -> None:
    """Each rank writes its shards. A collective. The schedule is a function of `version`, so that is its state.

    Raises OSError that names the rank and its cause.
    """
    state = {"version": torch.tensor(version), **_state(model, optimizer, version)}
    with _in_words(OSError, f"{directory} can't be written"):
        dcp.save(state, checkpoint_id=directory)


def load_sharded(directory: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
    """Fill model and optimizer in place from a checkpoint of any number of ranks; return its version. A collective.

    Raises ValueError that names the rank and its cause.
    """
    if not (Path(directory) / ".metadata").is_file():
        raise ValueError(f"resume: {directory!r} holds no checkpoint of a learner (no .metadata)")
    saved, told = torch.tensor(0), f"resume: {directory} can't be read"
    with _in_words(ValueError, told):
        dcp.load({"version": saved}, storage_reader=SafeReader(directory))
    version = int(saved)
    optimizer.zero_grad()  # open gradients would keep torch from laying out the optimizer's state
    state = _state(model, optimizer, version)
    with _in_words(ValueError, told):
        dcp.load(state, storage_reader=SafeReader(directory))
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))  # of what learns, all is there
    if version > 0:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    else:
        optimizer.state.clear()
    return version


def export_hf(
    directory: str, model: PreTrainedModel, source: str, lora: LoraConfig | None = None, adapter_dir: str = ""
) -> None:
    """A Hugging Face directory with this model's weights and the tokenizer of `source`. A collective; rank 0 writes.

    Adapters are merged into it, and written to `adapter_dir` in peft's format.
    """
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=whole)
    if not dist.is_initialized() or dist.get_rank() == 0:
        if lora is not None and lora.learns:
            save_adapters(adapter_dir, model, weights, lora)
            weights = merged_state(model, weights)
        model.save_pretrained(directory, state_dict=weights)
        for pattern in COPIED_FILES:
            for file in Path(source).glob(pattern):
                shutil.copy(file, directory)
    if dist.is_initialized():
        dist.barrier()  # nobody reads what rank 0 is still writing


@contextmanager
def _in_words(kind: type[Exception], told: str) -> Iterator[None]:
    """Torch tells failures of any rank to all of them, by what is no Exception and holds everybody's tracebacks."""
    try:
        yield
    except CheckpointException as error:
        rank = min(error.failures)
        cause, _ = error.failures[rank]
        raise kind(f"{told}: rank {rank}: {type(cause).__name__}: {cause}") from cause


def _state(model: PreTrainedModel, optimizer: torch.optim.Optimizer, version: int) -> dict[str, Any]:
    """Before the first step there is no optimizer state. Asked for it, torch makes one up by a step that counts."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    learned = {name: tensor for name, tensor in get_model_state_dict(model).items() if name not in frozen}
    state: dict[str, Any] = {"model": learned}
    if version > 0:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state
