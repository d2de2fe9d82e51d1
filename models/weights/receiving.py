"""Ways for a bucket's bytes to reach an engine: every payload as torch tensors. Neither sends nor loads them.

    group = BroadcastGroup(device, local_rank)      # one per process
    group.join(link)                                # begin_weights; link None: no broadcasts
    with received(bucket, group) as tensors:        # load_bucket
        checksums |= checksums_of(tensors)
        load(tensors)

Engines' workers import this: torch, numpy and safetensors are all it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from mmap import ACCESS_COPY, mmap
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.arena import bytes_of, room_for, views
from models.types import (
    Broadcast,
    InlineBytes,
    ModelFiles,
    SafetensorsFile,
    SharedMemory,
    WeightBucket,
    WeightTensor,
)
from models.weights.checksums import tensor_checksums
from models.weights.gpu_handles import opened
from models.weights.process_group import BroadcastGroup

Received = list[tuple[WeightTensor, Tensor]]


@contextmanager
def received(bucket: WeightBucket, group: BroadcastGroup | None = None) -> Iterator[Received]:
    """The tensors of a bucket, in order, in the announced type and shape: to be read within the block only.

    On the CPU, or on the device where they came. Raises ValueError naming a tensor that isn't what was announced,
    ConnectionError where a broadcast broke off.
    """
    tensors = [_checked(announced, tensor) for announced, tensor in _arrivals(bucket, group)]
    try:
        yield tensors
    finally:
        tensors.clear()  # what is mapped is let go of with its last tensor


def checksums_of(tensors: Received) -> dict[str, str]:
    """Name -> checksum of what really came."""
    sums = tensor_checksums([tensor for _, tensor in tensors])
    return {announced.name: checksum for (announced, _), checksum in zip(tensors, sums, strict=True)}


def num_bytes(tensor: WeightTensor) -> int:
    """Of one tensor, unsharded, as it travels."""
    return bytes_of(_dtype(tensor), tensor.shape)


def _arrivals(bucket: WeightBucket, group: BroadcastGroup | None) -> Iterator[tuple[WeightTensor, Tensor]]:
    tensors, payload = bucket.tensors, bucket.payload
    if isinstance(payload, InlineBytes):
        came: Sequence[Tensor] = _inline(tensors, payload)
    elif isinstance(payload, SharedMemory):
        came = _mapped(tensors, payload)
    elif isinstance(payload, SafetensorsFile):
        came = _read(tensors, payload)
    elif isinstance(payload, Broadcast):
        if group is None:
            raise ConnectionError("weights: a bucket comes by broadcast, but this engine has no process group")
        names, shapes = [tensor.name for tensor in tensors], [tensor.shape for tensor in tensors]
        came = group.receive(names, [_dtype(tensor) for tensor in tensors], shapes)
    elif isinstance(payload, ModelFiles):
        raise ValueError(f"weights: {payload.path} is for engines that read model files themselves")
    else:
        came = opened(payload.handles)
    return zip(tensors, came, strict=True)


def _checked(announced: WeightTensor, tensor: Tensor) -> tuple[WeightTensor, Tensor]:
    if tensor.dtype != _dtype(announced) or tuple(tensor.shape) != announced.shape:
        raise ValueError(
            f"weights: {announced.name!r} was announced as {announced.dtype} {announced.shape}, "
            f"but arrived as {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        )
    return announced, tensor


def _inline(tensors: Sequence[WeightTensor], payload: InlineBytes) -> list[Tensor]:
    came = []
    for tensor, data in zip(tensors, payload.data, strict=True):
        if data.nbytes != num_bytes(tensor):
            raise ValueError(
                f"weights: {tensor.name!r} arrived with {data.nbytes} bytes instead of {num_bytes(tensor)}"
            )
        # torch wants memory that may be written; what lies in a shared store may not.
        writable = data if data.flags.writeable else data.copy()
        came.append(torch.from_numpy(writable).view(_dtype(tensor)).view(tensor.shape))
    return came


def _mapped(tensors: Sequence[WeightTensor], payload: SharedMemory) -> list[Tensor]:
    """Without a copy, and without the right to write: a page that is written to becomes this process's own."""
    dtypes, shapes = [_dtype(tensor) for tensor in tensors], [tensor.shape for tensor in tensors]
    room = max(room_for(dtypes, shapes), 1)
    with Path(payload.path).open("rb") as file:
        size = file.seek(0, 2)
        if size < room:
            last = tensors[-1].name if tensors else ""
            raise ValueError(f"weights: {payload.path} ends before {last!r}: {size} bytes instead of {room}")
        mapping = mmap(file.fileno(), room, access=ACCESS_COPY)
    return views(torch.frombuffer(mapping, dtype=torch.uint8), dtypes, shapes)


def _read(tensors: Sequence[WeightTensor], payload: SafetensorsFile) -> list[Tensor]:
    came = []
    try:
        with safe_open(payload.path, framework="pt", device="cpu") as file:
            for tensor in tensors:
                came.append(file.get_tensor(tensor.name))
    except SafetensorError as error:
        raise ValueError(f"weights: {payload.path} can't be read at {tensors[len(came)].name!r}: {error}") from None
    return came


def _dtype(tensor: WeightTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype
