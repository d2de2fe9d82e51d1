"""Checksums that prove that weights arrived: 64 bits of tensors' bytes, computed where they are."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grmpipe.models.checksum import checksum

ON_DEVICE = "device-"  # prefix of a sum that isn't xxh3
WORD_BYTES, WORD_MASK = 8, (1 << 64) - 1
PIECE_WORDS, LARGE_WORDS = 1 << 22, 1 << 16
THREADS_FROM_BYTES = 1 << 25  # takes about as long as the start of the threads
# Odd, so that no bit is lost; from splitmix64, as signed numbers.
PLACE_FACTOR, MIX_FACTOR, LAST_FACTOR = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def tensor_checksums(tensors: Sequence[Tensor]) -> list[str]:
    """The checksum of each tensor's raw bytes: xxh3 on the host; on a device another sum, computed there, with a
    prefix.

    Uses threads for large sets, because xxhash releases the GIL. Synchronizes with a device once.
    """
    if not all(tensor.device.type == "cpu" for tensor in tensors):
        return device_checksums(tensors)
    if sum(tensor.nbytes for tensor in tensors) < THREADS_FROM_BYTES:
        return [_tensor_checksum(tensor) for tensor in tensors]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="checksums") as threads:
        return list(threads.map(_tensor_checksum, tensors))


@torch.no_grad()
def device_checksums(tensors: Sequence[Tensor]) -> list[str]:
    """Checksums computed by torch on the tensors' device, the same on any device. A sum of mixed words, each with its
    place in the mix, so that a changed bit, a swap and a shift all change it.

    All tensors go through the same few operations, PIECE_WORDS at a time: by tensor they took 0.2 ms of a small one.
    """
    if not tensors:
        return []
    device = tensors[0].device
    sums_N = torch.tensor([tensor.nbytes for tensor in tensors], device=device)  # with wraparound
    for parts in _divide(tensors):
        words_W = _join(parts, device)
        if len(parts) == 1:
            start = parts[0].start
            sums_N[parts[0].index] += _mix(words_W, torch.arange(start, start + len(words_W), device=device)).sum()
            continue
        index_P, start_P, count_P = torch.tensor(
            [(part.index, part.start, part.num_words) for part in parts], device=device
        ).T
        end_P = count_P.cumsum(0)
        place_W = torch.arange(len(words_W), device=device)
        place_W += torch.repeat_interleave(start_P - end_P + count_P, count_P, output_size=len(words_W))
        upto_P = _mix(words_W, place_W).cumsum(0)[end_P - 1]
        sums_N.index_add_(0, index_P, upto_P.diff(prepend=upto_P.new_zeros(1)))
    return [f"{ON_DEVICE}{value & WORD_MASK:016x}" for value in sums_N.tolist()]


def as_bytes(tensor: Tensor) -> np.ndarray:
    """A CPU tensor's bytes, uint8 and 1-D. A view if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _tensor_checksum(tensor: Tensor) -> str:
    return checksum(as_bytes(tensor))


@dataclass(frozen=True, slots=True)
class _Part:
    """Some words of the tensor at an index, from the word `start` on. The last one is filled up with zeros."""

    index: int
    start: int
    raw_B: Tensor

    @property
    def num_words(self) -> int:
        return -(-self.raw_B.numel() // WORD_BYTES)


def _divide(tensors: Sequence[Tensor]) -> Iterator[list[_Part]]:
    """All bytes in order, PIECE_WORDS at a time, so that the extra memory is bounded; a large tensor alone, because it
    needn't be copied.
    """
    parts: list[_Part] = []
    room = PIECE_WORDS
    for index, tensor in enumerate(tensors):
        raw_B = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if parts and raw_B.numel() >= LARGE_WORDS * WORD_BYTES:
            yield parts
            parts, room = [], PIECE_WORDS
        start = 0
        while start * WORD_BYTES < raw_B.numel():
            part = _Part(index, start, raw_B[start * WORD_BYTES :][: room * WORD_BYTES])
            parts.append(part)
            start, room = start + part.num_words, room - part.num_words
            if not room or part.num_words >= LARGE_WORDS:
                yield parts
                parts, room = [], PIECE_WORDS
    if parts:
        yield parts


def _mix(words_W: Tensor, place_W: Tensor) -> Tensor:
    """Words that depend on their place, from 0; `place_W` is overwritten."""
    mixed_W = (words_W ^ place_W.add_(1).mul_(PLACE_FACTOR)).mul_(MIX_FACTOR)
    return mixed_W.bitwise_xor_(mixed_W >> 31).mul_(LAST_FACTOR)


def _join(parts: Sequence[_Part], device: torch.device) -> Tensor:
    """The parts' words, int64; without a copy if there is one part."""
    zeros_B = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=device)
    filled = []
    for part in parts:
        filled.append(part.raw_B if part.raw_B.device == device else part.raw_B.to(device))
        if missing := -part.raw_B.numel() % WORD_BYTES:
            filled.append(zeros_B[:missing])
    aligned = len(filled) == 1 and filled[0].storage_offset() % WORD_BYTES == 0
    return (filled[0] if aligned else torch.cat(filled)).view(torch.int64)
