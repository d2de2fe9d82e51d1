"""Tensors in a GPU's memory as another process on the same GPU opens them (CUDA IPC). Copies nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

Handle = tuple[object, ...]
STORAGE_DEVICE = 6  # the place of the device among the arguments of `rebuild_cuda_tensor`


def gpu_id(device: torch.device | int) -> str:
    """Processes number the GPUs that they see anew; the uuid is the same in all of them."""
    return str(torch.cuda.get_device_properties(device).uuid)


def handles_of(tensors: Sequence[Tensor]) -> tuple[Handle, ...]:
    return tuple(tuple(reduce_tensor(tensor)[1]) for tensor in tensors)


def opened(handles: Mapping[str, Sequence[Handle]]) -> list[Tensor]:
    """Of the GPU that this process sees. Raises ValueError where the handles are of none of its own."""
    for device in gpus_seen():
        if (own := handles.get(gpu_id(device))) is not None:
            return [_opened(handle, device) for handle in own]
    raise ValueError(
        f"sync.transport: cuda_ipc is for engines on the learner's GPUs ({', '.join(handles)}); this engine has "
        "none of them: set sync.transport=auto"
    )


def gpus_seen() -> range:
    return range(torch.cuda.device_count())


def _opened(handle: Handle, device: int) -> Tensor:
    arguments: list[Any] = [*handle]
    arguments[STORAGE_DEVICE] = device
    tensor: Tensor = rebuild_cuda_tensor(*arguments)
    return tensor
