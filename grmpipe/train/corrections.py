"""Sampler and trainer don't agree to the last bit: weights that correct for it, figures that watch it. Pure.

mu: the engine's distribution when it sampled. pi_old: the trainer's, of the weights that the update starts from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grmpipe.train.settings import AlgorithmConfig

MAX_LOG_RATIO = 20.0  # e^20 is 5e8: a ratio beyond that is a fault, and must not become inf
BAND_LOG_RATIO = 0.0953  # ln 1.1: a token's probability differs by more than a tenth

Correction = Callable[[Tensor, Tensor, AlgorithmConfig], Tensor]


def log_ratio(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """log p - log q per token, within +-20."""
    return (numerator_T - denominator_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def truncated_importance(old_logprobs_T: Tensor, sampler_logprobs_T: Tensor, cap: float) -> Tensor:
    """TIS: w = min(pi_old / mu, cap) per token, without gradient."""
    return log_ratio(old_logprobs_T, sampler_logprobs_T).exp().clamp(max=cap)


CORRECTIONS: dict[str, Correction] = {
    "none": lambda old_T, sampler_T, algorithm: torch.ones_like(old_T),
    "tis": lambda old_T, sampler_T, algorithm: truncated_importance(old_T, sampler_T, algorithm.tis_cap),
}


def mismatch(abs_log_ratios_N: Tensor) -> dict[str, float]:
    """|log pi_old - log mu| over a batch's N trained tokens: mean, 95th percentile, maximum, share beyond 10 %.

    A mean that grows is numerics or staleness; a maximum alone is one unlucky token; a share near 1 means that the
    engine has other weights than the learner.
    """
    ordered_N = abs_log_ratios_N.double().sort().values
    if len(ordered_N) == 0:
        return {}
    return {
        "mismatch/mean_nats": ordered_N.mean().item(),
        "mismatch/p95_nats": ordered_N[int(0.95 * (len(ordered_N) - 1))].item(),
        "mismatch/max_nats": ordered_N[-1].item(),
        "mismatch/out_of_band_share": (ordered_N > BAND_LOG_RATIO).double().mean().item(),
    }
