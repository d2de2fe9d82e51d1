"""What proves that weights arrived: blake2b-64 of tensors' bytes, many at once. Needs torch and nothing of ours."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor


def checksum(data: np.ndarray | bytes) -> str:
    """blake2b with 64 bits, in hex, of bytes or a contiguous numpy array."""
    # As bytes: hashlib takes no empty array of any other type.
    raw = data.view(np.uint8).data if isinstance(data, np.ndarray) and data.size else bytes(data)
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def tensor_checksums(tensors: Sequence[Tensor]) -> list[str]:
    """Of each tensor's raw bytes; empty for one on a device, whose bytes never come here to be hashed.

    In threads: hashlib lets go of the GIL, and a core hashes about 1 GB/s, a tenth of what it copies.
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
