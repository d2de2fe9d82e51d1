"""AdamW's moments in fewer bytes: 16 bits with stochastic rounding, or 8 bits by blocks. Pure.

8 bits are the dynamic code of arXiv 2110.02861 (section 2.2), for blocks of BLOCK values within a row, each divided by
its largest magnitude. A block never crosses a row, so a checkpoint of it can be divided among other ranks.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
DECADES = 7  # orders of magnitude that the code spans


@functools.cache
def code_values(signed: bool) -> tuple[float, ...]:
    """The 256 values of the dynamic code, rising to 1: finer intervals for larger decades, 0 and 1 exactly."""
    found = [0.0, 1.0]
    for decade in range(DECADES):
        intervals = 2**decade if signed else 2 ** (decade + 1)
        middles = [10.0 ** (decade - DECADES + 1) * (0.1 + 0.9 * (k + 0.5) / intervals) for k in range(intervals)]
        found += middles + ([-value for value in middles] if signed else [])
    return tuple(sorted(found))


@functools.cache
def _limits(signed: bool, device: torch.device) -> Tensor:
    """Above which of 255 limits a value is tells its code. Unsigned values above 0 never get the code of 0: a second
    moment of 0 would divide an update by nothing.
    """
    values = code_values(signed)
    limits = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    return torch.tensor(limits if signed else [0.0, *limits[1:]], device=device)


@functools.cache
def _values(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(code_values(signed), device=device)


def num_blocks(row_length: int) -> int:
    return -(-row_length // BLOCK)


def to_8bit(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """[.., D] float -> codes [.., D] uint8, and the largest magnitude of each block, [.., num_blocks(D)] float32."""
    length = values.shape[-1]
    padded = F.pad(values.float(), (0, num_blocks(length) * BLOCK - length)).unflatten(-1, (-1, BLOCK))
    scale = padded.abs().amax(-1)
    shares = padded / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(shares, _limits(signed, values.device), out_int32=True).to(torch.uint8)
    return codes.flatten(-2)[..., :length], scale


def from_8bit(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """The inverse of `to_8bit`, up to rounding. float32."""
    factors = scale.repeat_interleave(BLOCK, dim=-1)[..., : codes.shape[-1]]
    return _values(signed, codes.device)[codes.int()] * factors


def to_bfloat16(values: Tensor, random: torch.Generator) -> Tensor:
    """Rounded up or down at random, so that the mean of the result is the value: small changes aren't lost."""
    bits = values.float().contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=values.device, generator=random)
    return ((bits + noise) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)
