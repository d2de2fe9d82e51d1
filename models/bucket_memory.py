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


class BucketMemory:
    """Memory of this process that grows to the largest bucket."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory_B = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Tensors in the same memory as those of the last call."""
        room = room_for(dtypes, shapes)
        if room > self._memory_B.numel():
            self._memory_B = torch.empty(0, dtype=torch.uint8, device=self._device)  # free it before taking more
            self._memory_B = torch.empty(room, dtype=torch.uint8, device=self._device)
        return views(self._memory_B, dtypes, shapes)
