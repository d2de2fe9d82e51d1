"""Checksums that prove that weights arrived: 64 bits of tensors' bytes, computed where they are."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from grmpipe.models.checksum import checksum

ON_DEVICE = "device-"  # prefix of a sum that isn't xxh3
WORD_BYTES, WORD_MASK = 8, (1 << 64) - 1
PIECE_WORDS = 1 << 22
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
    """
    if not tensors:
        return []
    sums = torch.stack([_mixed_sum(tensor).to(tensors[0].device) for tensor in tensors])
    return [f"{ON_DEVICE}{value & WORD_MASK:016x}" for value in sums.tolist()]


def as_bytes(tensor: Tensor) -> np.ndarray:
    """A CPU tensor's bytes, uint8 and 1-D. A view if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _tensor_checksum(tensor: Tensor) -> str:
    return checksum(as_bytes(tensor))


def _mixed_sum(tensor: Tensor) -> Tensor:
    """The sum, int64 with wraparound. Computed in pieces, so that its extra memory is bounded."""
    raw_B = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw_B.numel() // WORD_BYTES * WORD_BYTES
    words_W = _words(raw_B[:whole])
    total = torch.full((), raw_B.numel(), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words_W), PIECE_WORDS):
        total = total + _mixed(words_W[start : start + PIECE_WORDS], start).sum()
    if whole < raw_B.numel():
        rest_B = torch.zeros(WORD_BYTES, dtype=torch.uint8, device=tensor.device)
        rest_B[: raw_B.numel() - whole] = raw_B[whole:]
        total = total + _mixed(rest_B.view(torch.int64), len(words_W)).sum()
    return total


def _words(raw_B: Tensor) -> Tensor:
    aligned = raw_B.storage_offset() % WORD_BYTES == 0
    return (raw_B if aligned else raw_B.clone()).view(torch.int64)


def _mixed(words_W: Tensor, start: int) -> Tensor:
    place_W = torch.arange(start + 1, start + 1 + len(words_W), dtype=torch.int64, device=words_W.device)
    mixed_W = (words_W ^ place_W.mul_(PLACE_FACTOR)).mul_(MIX_FACTOR)
    return mixed_W.bitwise_xor_(mixed_W >> 31).mul_(LAST_FACTOR)
