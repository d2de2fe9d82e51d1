"""Memory that is reused for one bucket after another: touching new pages costs more than a copy."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs


def round_up_to_page(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def count_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * torch.Size(shape).numel()


def room_for(dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> int:
    """The bytes of the tensors, each at the next multiple of 64."""
    return sum(round_up_to_page(count_bytes(dtype, shape)) for dtype, shape in zip(dtypes, shapes, strict=True))


def views(memory_B: Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors in order within uint8 memory, each at the next multiple of 64 bytes."""
    sizes = [count_bytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    ends = list(accumulate(round_up_to_page(size) for size in sizes))
    return [
        memory_B[end - round_up_to_page(size) :][:size].view(dtype).view(torch.Size(shape))
        for end, size, dtype, shape in zip(ends, sizes, dtypes, shapes, strict=True)
    ]


def pack(memory_B: Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors in order within uint8 memory, one directly after the other: the layout of a broadcast, and of
    SGLang's `FlattenedTensorBucket` (weight_sync/tensor_bucket.py of 0.5.23). Only for tensors of one dtype.
    """
    sizes = [count_bytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    pieces = memory_B[: sum(sizes)].split(sizes) if sizes else ()
    return [one.view(dtype).view(torch.Size(shape)) for one, dtype, shape in zip(pieces, dtypes, shapes, strict=True)]


class BucketMemory:
    """Memory of this process that grows to the largest bucket. memory_B: all of it, uint8; another tensor whenever it
    grew.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.memory_B = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Tensors in the same memory as those of the last call."""
        return views(self._reserve(room_for(dtypes, shapes)), dtypes, shapes)

    def take_packed(
        self, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
    ) -> tuple[Tensor, list[Tensor]]:
        """The same without gaps (see `pack`): all their bytes, uint8, and the tensors."""
        size = sum(count_bytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True))
        memory_B = self._reserve(size)[:size]
        return memory_B, pack(memory_B, dtypes, shapes)

    def _reserve(self, num_bytes: int) -> Tensor:
        if num_bytes > self.memory_B.numel():
            self.memory_B = torch.empty(0, dtype=torch.uint8, device=self._device)  # free it before taking more
            self.memory_B = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self.memory_B
