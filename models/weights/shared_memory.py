"""Weights through files in this machine's memory: both ends."""

from collections.abc import Sequence
from mmap import ACCESS_COPY, mmap
from pathlib import Path

import torch
from torch import Tensor

from grmpipe.models.bucket_memory import room_for, views
from grmpipe.models.types import SharedMemory, WeightBucket, WeightTensor
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.transport_ends import CPU, UnshardedBucket, WeightTransport, open_bucket, parse_dtype
from grmpipe.models.weights.weight_files import SharedArena, folders_of_shared_memory, sweep


class SharedMemoryFiles(WeightTransport):
    """Two files in this machine's memory, filled alternately. They stay mapped: only the first push touches new
    pages.
    """

    def __init__(self, dtype: str, device: torch.device = CPU, folder: str = "") -> None:
        super().__init__(dtype, device, folder)
        for place in folders_of_shared_memory():
            sweep(place)
        self._next, self._other = SharedArena(), SharedArena()

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        slot = self._next
        self._next, self._other = self._other, self._next
        dtypes = self._dtypes(bucket)
        sent = views(slot.reserve(room_for(dtypes, bucket.shapes)), dtypes, bucket.shapes)
        self._fill(sent, bucket)
        return self._announce(bucket, sent, SharedMemory(path=slot.path))

    def close(self) -> None:
        self._next.close()
        self._other.close()


@open_bucket.register
def _(payload: SharedMemory, tensors: Sequence[WeightTensor], group: BroadcastLink | None = None) -> list[Tensor]:
    """Tensors without a copy, and read-only: a page that is written to would become this process's own."""
    dtypes, shapes = [parse_dtype(tensor) for tensor in tensors], [tensor.shape for tensor in tensors]
    room = max(room_for(dtypes, shapes), 1)
    with Path(payload.path).open("rb") as file:
        size = file.seek(0, 2)
        if size < room:
            last = tensors[-1].name if tensors else ""
            raise ValueError(f"weights: {payload.path} ends before {last!r}: {size} bytes instead of {room}")
        mapping = mmap(file.fileno(), room, access=ACCESS_COPY)
    return views(torch.frombuffer(mapping, dtype=torch.uint8), dtypes, shapes)
