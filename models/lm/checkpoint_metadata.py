"""Reads a sharded checkpoint with an untrusted .metadata, which is a pickle: makes only data and runs nothing."""

import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

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
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f".metadata refers to {module}.{name}, which no checkpoint needs")
        return KNOWN[module, name]


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f".metadata refers to the layout {name!r}")
    return layout
