"""Checkpoints: sharded ones that any number of ranks can load, and Hugging Face directories.

Frozen weights aren't saved: they never change, and a resumed run loads the same files. A .metadata is a pickle,
and untrusted: its reader makes only data, and runs nothing.
"""

import pathlib
import pickle
import shutil
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from grmpipe.models.lm.lora import merge_state, save_adapters
from grmpipe.models.lm.parallel.ranks import group_for_files
from grmpipe.models.settings import LoraConfig
from grmpipe.models.stored_files import StoredFile, describe_files, sync_directory

# A single rank's state is complete, but torch warns of that each time.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch")

SHARD_SIZE = "5GB"  # most in a file of an export
COPIED_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja",
    "generation_config.json",
)  # fmt: skip


class ShardedSave:
    """Saves of one model. Each rank writes its shards; at most one save is in progress. The learning-rate schedule is a
    function of `version`, so it has no other state.
    """

    def __init__(self) -> None:
        self._written: Future[tuple[StoredFile, ...]] = Future()

    def begin(
        self,
        directory: str,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        version: int,
        in_background: bool,
    ) -> None:
        """A collective. in_background: copy the state to the host, and write it from there while training continues;
        otherwise it is written when this returns.
        """
        state = {"version": torch.tensor(version), **_state(model, optimizer, version)}
        if in_background:
            stager = DefaultStager(StagingOptions(False, False, False, False))
            copied = cast(dict[str, Any], stager.stage(state))
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            self._written = thread.submit(_write, directory, copied)
            thread.shutdown(wait=False)  # it ends with its only work
        else:
            self._written = Future()
            self._written.set_result(_write(directory, state))

    def files(self) -> tuple[StoredFile, ...] | None:
        """The files that this rank wrote, synced to the disk; None while it is writing. Raises OSError that names rank
        and cause.
        """
        return self._written.result() if self._written.done() else None


def load_sharded(directory: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
    """Fill model and optimizer in place from a checkpoint of any number of ranks; return its version. A collective.

    Raises ValueError that names the rank and its cause.
    """
    if not (Path(directory) / ".metadata").is_file():
        raise ValueError(f"resume: {directory!r} holds no checkpoint of a learner (no .metadata)")
    saved, problem = torch.tensor(0), f"resume: {directory} can't be read"
    with _in_words(ValueError, problem):
        dcp.load({"version": saved}, storage_reader=SafeReader(directory))
    version = int(saved)
    optimizer.zero_grad()  # open gradients would keep torch from creating the optimizer's state
    state = _state(model, optimizer, version)
    with _in_words(ValueError, problem):
        dcp.load(state, storage_reader=SafeReader(directory))
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))  # has all trained ones
    if version > 0:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    else:
        optimizer.state.clear()
    return version


def export_hf(
    directory: str,
    model: PreTrainedModel,
    source: str,
    lora: LoraConfig | None = None,
    adapter_dir: str = "",
    *,
    dtype: str | None = None,
    exact: Sequence[str] = (),
) -> None:
    """Write a Hugging Face directory with this model's weights and the tokenizer of `source`, the directory it came
    from.

    A collective while weights are gathered; then rank 0 writes, without others waiting in a process group. Adapters are
    merged into the weights, and also written to `adapter_dir` in peft's format.

    dtype: the files'; None: as in `source`. exact: submodules that keep their type.
    """
    kind = getattr(torch, dtype) if dtype is not None else _dtype_of(source, model)
    merges = lora is not None and lora.learns
    weights = _gathered(model, None if merges else kind, exact)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if lora is not None and lora.learns:
        save_adapters(adapter_dir, model, weights, lora)
        weights = {name: _cast(tensor, kind) for name, tensor in merge_state(model, weights).items()}
    model.save_pretrained(directory, state_dict=weights, max_shard_size=SHARD_SIZE)
    model.config.dtype = str(kind).removeprefix("torch.")  # transformers set that of the model in memory
    model.config.save_pretrained(directory)
    for pattern in COPIED_FILES:
        for file in Path(source).glob(pattern):
            shutil.copy(file, directory)


def _dtype_of(source: str, model: PreTrainedModel) -> torch.dtype:
    """The dtype of a model's files by their config.json, otherwise the model's."""
    dtype = AutoConfig.from_pretrained(source).dtype
    return dtype if isinstance(dtype, torch.dtype) else model.dtype


def _gathered(model: PreTrainedModel, dtype: torch.dtype | None, exact: Sequence[str]) -> dict[str, Tensor]:
    """Whole tensors on rank 0's host, cast before they are sent; empty on other ranks. A collective."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    weights: dict[str, Tensor] = {}
    for name, tensor in cast(dict[str, Tensor], get_model_state_dict(model)).items():
        kept = dtype is None or any(name.startswith(f"{module}.") for module in exact)
        held = tensor.detach() if kept else _cast(tensor.detach(), dtype)
        whole = held.full_tensor() if isinstance(held, DTensor) else held
        if first:
            weights[name] = whole.cpu()
    return weights


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextmanager
def _in_words(kind: type[Exception], problem: str) -> Iterator[None]:
    """Context: torch reports a failure on any rank to all ranks, as an error that isn't an Exception and holds all
    tracebacks.
    """
    try:
        yield
    except CheckpointException as error:
        rank = min(error.failures)
        cause, _ = error.failures[rank]
        raise kind(f"{problem}: rank {rank}: {type(cause).__name__}: {cause}") from cause


def _write(directory: str, state: dict[str, Any]) -> tuple[StoredFile, ...]:
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    rank = 0 if alone else dist.get_rank()
    with _in_words(OSError, f"{directory} can't be written"):
        dcp.save(state, storage_writer=FileSystemWriter(directory), process_group=group_for_files(), no_dist=alone)
    sync_directory(Path(directory))
    names = [path.name for path in Path(directory).glob(f"__{rank}_*")] + ([".metadata"] if rank == 0 else [])
    return describe_files(Path(directory), sorted(names))


def _state(model: PreTrainedModel, optimizer: torch.optim.Optimizer, version: int) -> dict[str, Any]:
    """The state to save. Before the first step there is no optimizer state: torch would create it by a step that
    counts.
    """
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    learned = {name: tensor for name, tensor in get_model_state_dict(model).items() if name not in frozen}
    state: dict[str, Any] = {"model": learned}
    if version > 0:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


RECORDS = {
    (metadata.__name__, name): found
    for name, found in vars(metadata).items()
    if isinstance(found, type) and found.__module__ == metadata.__name__
}
KNOWN: dict[tuple[str, str], object] = {
    **RECORDS,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,  # as Python 3.13 calls it
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
}


class SafeReader(FileSystemReader):
    """A reader that unpickles .metadata safely. Torch loads tensors with `weights_only`, but not .metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Raises UnpicklingError for objects that no checkpoint needs."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            read = _MetadataUnpickler(file).load()
        if not isinstance(read, metadata.Metadata):
            raise pickle.UnpicklingError(f".metadata holds {type(read).__name__} instead of metadata")
        read.storage_meta = read.storage_meta or metadata.StorageMeta()
        read.storage_meta.load_id = self.load_id
        return read


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("builtins", "getattr"):  # a member of an enum, as Python 3.11.2 (Debian 12) pickles it
            return _member
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, which no checkpoint needs")
        return KNOWN[module, name]


def _member(kind: object, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f".metadata refers to {name!r} of {kind!r}, which no checkpoint needs")
    return kind[name]


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f".metadata refers to the layout {name!r}")
    return layout


def average_files(directory: str, other: str, share: float) -> None:
    """Replace the weights in `directory` by `share` of theirs and the rest of those in `other`, in float32: 16 bits
    would round a small share away. Raises ValueError if `other` lacks a tensor, or has another shape of it.
    """
    with ExitStack() as opened:
        there = [opened.enter_context(safe_open(file, "pt")) for file in sorted(Path(other).glob("*.safetensors"))]
        places = {name: file for file in there for name in file.keys()}  # noqa: SIM118  it is no mapping
        for path in Path(directory).glob("*.safetensors"):
            tensors = load_file(path)
            for name, own in tensors.items():
                before = places[name].get_tensor(name) if name in places else None
                if before is None or before.shape != own.shape:
                    raise ValueError(f"{other} has no {name} like that of {directory}: they are different models")
                tensors[name] = torch.lerp(before.float(), own.float(), share)
            save_file(tensors, path, metadata={"format": "pt"})
