"""Losses per token, and how tokens add up to the loss of a batch. Pure.

A batch is trained in pieces before its size is known. So a piece's loss is a weighted *sum* over tokens, and the
optimizer step divides the gradients by the denominator, once, when the batch is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grmpipe.train.corrections import log_ratio
from grmpipe.train.settings import AlgorithmConfig
from grmpipe.types import BatchTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    loss_T: Tensor
    clipped_T: Tensor  # 1 where the clip took the gradient away


Loss = Callable[[Tensor, Tensor, Tensor, AlgorithmConfig], PolicyLoss]


def ppo_clip(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = pi_theta / pi_old (PPO, arXiv 1707.06347; two clips: DAPO)."""
    ratio_T = log_ratio(logprobs_T, old_logprobs_T).exp()
    free_T = ratio_T * advantages_T
    held_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    return PolicyLoss(loss_T=-torch.minimum(free_T, held_T), clipped_T=(held_T < free_T).to(free_T.dtype))


LOSSES: dict[str, Loss] = {
    "ppo_clip": lambda logprobs_T, old_T, advantages_T, algorithm: ppo_clip(
        logprobs_T, old_T, advantages_T, algorithm.clip_low, algorithm.clip_high
    ),
}


def k3_kl(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """KL(pi_theta || pi_ref) per token, the k3 estimator: e^x - x - 1 with x = log pi_ref - log pi_theta. Never < 0."""
    x_T = log_ratio(reference_logprobs_T, logprobs_T)
    return x_T.exp() - x_T - 1


def by_token(loss_mask_T: Tensor, sample_lengths_S: Tensor) -> Tensor:
    """Every trained token counts the same."""
    return loss_mask_T


def by_sequence(loss_mask_T: Tensor, sample_lengths_S: Tensor) -> Tensor:
    """Every sample counts the same: a trained token weighs 1 / (trained tokens of its sample)."""
    trained_S = torch.stack([mask.sum() for mask in loss_mask_T.split(sample_lengths_S.tolist())])
    return loss_mask_T / trained_S.clamp(min=1).repeat_interleave(sample_lengths_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """weigh: (loss_mask_T, sample_lengths_S) -> weights_T. denominator: (totals, max_new_tokens) -> what divides."""

    weigh: Callable[[Tensor, Tensor], Tensor]
    denominator: Callable[[BatchTotals, int], float]


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": Aggregation(weigh=by_token, denominator=lambda totals, max_new_tokens: totals.num_loss_tokens),
    "sequence_mean": Aggregation(weigh=by_sequence, denominator=lambda totals, max_new_tokens: totals.num_sequences),
    # Dr.GRPO: a constant, so that long answers aren't weighed down.
    "constant": Aggregation(
        weigh=by_token, denominator=lambda totals, max_new_tokens: totals.num_sequences * max_new_tokens
    ),
}
