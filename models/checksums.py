"""What proves that weights arrived: xxh3-64 of tensors' bytes, many at once. Needs nothing of ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
import xxhash
from torch import Tensor


def checksum(data: np.ndarray | bytes) -> str:
    """xxh3 with 64 bits, in hex, of bytes or a contiguous numpy array.

    Against accidents, not against forgers: a cryptographic hash takes ten times as long as the push itself.
    """
    # As bytes: an empty array of any other type is refused.
    raw = data.view(np.uint8).data if isinstance(data, np.ndarray) and data.size else bytes(data)
    return xxhash.xxh3_64_hexdigest(raw)


def tensor_checksums(tensors: Sequence[Tensor]) -> list[str]:
    """Of each tensor's raw bytes; empty for one on a device, whose bytes never come here to be hashed.

    In threads: xxhash lets go of the GIL while it hashes.
    """
    return list(_threads().map(_tensor_checksum, tensors))


def as_bytes(tensor: Tensor) -> np.ndarray:
    """A CPU tensor's bytes, uint8 and 1-D. A view, where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _tensor_checksum(tensor: Tensor) -> str:
    return checksum(as_bytes(tensor)) if tensor.device.type == "cpu" else ""


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="checksums")
