"""How far a critic's values are from what came: the loss, and what people read. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from grmpipe.types import Metrics

if TYPE_CHECKING:  # the driver needs value_quality alone
    from torch import Tensor


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """1/2 max((v - R)^2, (clip(v, v_old +- clip) - R)^2) of each token, and 1 where the second is the larger one: there
    the gradient is 0, the value having gone further from v_old than `clip` (PPO, as in arXiv 2005.12729).

    None clips nothing.
    """
    plain_T = (values_T - returns_T).square()
    if clip is None:
        return 0.5 * plain_T, plain_T.new_zeros(plain_T.shape)
    held_T = values_T.clamp(old_values_T - clip, old_values_T + clip)
    clipped_T = (held_T - returns_T).square()
    return 0.5 * plain_T.maximum(clipped_T), (clipped_T > plain_T).to(plain_T.dtype)


def value_quality(values_N: np.ndarray, returns_N: np.ndarray) -> Metrics:
    """Of a batch's N tokens. Explained variance: 1 - var(R - V) / var(R); 1 is perfect, 0 is what a constant would be,
    below it the critic does harm. Left out where all returns are equal."""
    told = {"critic/value_mean": float(values_N.mean()), "critic/return_mean": float(returns_N.mean())}
    variance = float(returns_N.var())
    if variance > 0:
        told["critic/explained_variance"] = 1.0 - float((returns_N - values_N).var()) / variance
    return told
