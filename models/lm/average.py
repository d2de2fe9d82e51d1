"""The average of two models' files."""

from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


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
