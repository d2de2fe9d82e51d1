"""The loss of a critic's values against the returns, and metrics of their quality. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from grmpipe.types import Metrics

if TYPE_CHECKING:  # the driver needs value_quality alone
    from torch import Tensor


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """1/2 max((v - R)^2, (clip(v, v_old +- clip) - R)^2) per token, and 1 if the second term is larger: then the
    gradient is 0, because the value has moved further from v_old than `clip` (PPO, as in arXiv 2005.12729).

    clip: in reward units; None disables it.
    """
    plain_T = (values_T - returns_T).square()
    if clip is None:
        return 0.5 * plain_T, plain_T.new_zeros(plain_T.shape)
    held_T = values_T.clamp(old_values_T - clip, old_values_T + clip)
    clipped_T = (held_T - returns_T).square()
    return 0.5 * plain_T.maximum(clipped_T), (clipped_T > plain_T).to(plain_T.dtype)


def value_quality(values_N: np.ndarray, returns_N: np.ndarray) -> Metrics:
    """Metrics over a batch's N tokens. Explained variance: 1 - var(R - V) / var(R); 1 is perfect, 0 is a constant,
    below 0 the critic does harm. Left out if all returns are equal.
    """
    metrics = {"critic/value_mean": float(values_N.mean()), "critic/return_mean": float(returns_N.mean())}
    variance = float(returns_N.var())
    if variance > 0:
        metrics["critic/explained_variance"] = 1.0 - float((returns_N - values_N).var()) / variance
    return metrics
