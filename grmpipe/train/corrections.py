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
OLDEST_AGE = 5  # and more, under one name

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


def mismatch(abs_log_ratios_N: Tensor, area: str = "mismatch") -> dict[str, float]:
    """|log pi_old - log mu| over N trained tokens: mean, 95th percentile, maximum, share beyond 10 %.

    A mean that grows is numerics or staleness; a maximum alone is one unlucky token; a share near 1 means that the
    engine has other weights than the learner.
    """
    ordered_N = abs_log_ratios_N.double().sort().values
    if len(ordered_N) == 0:
        return {}
    return {
        f"{area}/mean_nats": ordered_N.mean().item(),
        f"{area}/p95_nats": ordered_N[int(0.95 * (len(ordered_N) - 1))].item(),
        f"{area}/max_nats": ordered_N[-1].item(),
        f"{area}/out_of_band_share": (ordered_N > BAND_LOG_RATIO).double().mean().item(),
    }


def mismatch_by_age(abs_log_ratios_N: Tensor, ages_N: Tensor) -> dict[str, float]:
    """The same for the tokens of each age: batches trained since they were sampled. And the share that an age has.

    Age 0 is numerics, and keys and values of older weights where an engine keeps them over a push: a mismatch that is
    large there means that the engine computes something else than the learner. What grows with age is staleness.
    """
    figures: dict[str, float] = {}
    ages_N = ages_N.clamp(0, OLDEST_AGE)
    for age in range(OLDEST_AGE + 1):
        of_age_N = ages_N == age
        if not of_age_N.any():
            continue
        area = f"mismatch/age_{age}" if age < OLDEST_AGE else f"mismatch/age_{OLDEST_AGE}_or_more"
        figures |= mismatch(abs_log_ratios_N[of_age_N], area)
        figures[f"{area}/token_share"] = of_age_N.double().mean().item()
    return figures
