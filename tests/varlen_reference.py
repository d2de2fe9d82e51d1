"""FlashAttention's contract in plain torch, in any type and on any device: it takes the kernel's place on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def exact_varlen(
    query_THD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    query_starts_S1: Tensor,
    key_starts_S1: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    **options: bool,
) -> Tensor:
    """FlashAttention's contract, sample by sample: the last query sees the last key, `window_size[0]` keys before its
    own (-1: all) and none after it."""
    assert window_size[1] == 0
    assert max_queries == int(query_starts_S1.diff().max()) and max_keys == int(key_starts_S1.diff().max())
    out = []
    for sample in range(len(query_starts_S1) - 1):
        query, key, value = (
            x[int(starts[sample]) : int(starts[sample + 1])].transpose(0, 1)
            for x, starts in ((query_THD, query_starts_S1), (key_KGD, key_starts_S1), (value_KGD, key_starts_S1))
        )
        repeats = query.shape[0] // key.shape[0]
        assert repeats == 1 or options.get("enable_gqa", False)
        key, value = (x.repeat_interleave(repeats, dim=0) for x in (key, value))
        behind = torch.arange(query.shape[1])[:, None] + key.shape[1] - query.shape[1] - torch.arange(key.shape[1])
        seen = (behind >= 0) if window_size[0] < 0 else (behind >= 0) & (behind <= window_size[0])
        scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        out.append((scores.masked_fill(~seen, -math.inf).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(out)
