"""Losses per token, and their aggregation to the loss of a batch. Pure. The table of losses is in
grmpipe/algorithm/parts.py. Imports no torch, as corrections.py.

A batch is trained in pieces before its size is known. So a piece's loss is a weighted *sum* over tokens, and the
optimizer step divides the gradients by the denominator, once, when the batch is closed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grmpipe.algorithm.corrections import MAX_LOG_RATIO, log_ratio
from grmpipe.algorithm.sequences import mean_by_sequence, sum_by_sequence, to_tokens
from grmpipe.algorithm.settings import AlgorithmSettings
from grmpipe.types import BatchTotals

if TYPE_CHECKING:
    from torch import Tensor

# -- the policy ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Tokens with their advantages. T: tokens of the loss, end to end by sequence, S: sequences. A rollout is one."""

    logprobs_T: Tensor  # log pi_theta, with gradient
    proximal_T: Tensor  # log pi_prox, without gradient
    advantages_T: Tensor
    loss_mask_T: Tensor
    sequence_lengths_S: Tensor

    def log_ratio_T(self) -> Tensor:
        """log r = log pi_theta - log pi_prox, within +-20 as in verl: beyond, a token has no gradient through r. Where
        r falls below, its gradient is 0 anyway; where it rises above, r A would outweigh all other tokens.
        """
        return log_ratio(self.logprobs_T, self.proximal_T)

    def mean_log_ratio_S(self) -> Tensor:
        """The mean of log r over each rollout, within +-20. No token is held by itself: each keeps its gradient."""
        means_S = mean_by_sequence(self.logprobs_T - self.proximal_T, self.loss_mask_T, self.sequence_lengths_S)
        return means_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Loss per token. It must not depend on other sequences, or gradients would depend on the packing."""

    loss_T: Tensor
    clipped_T: Tensor  # 1 if the clip removes the gradient, or would


def compute_clipped_loss(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A)."""
    free_T = ratio_T * advantages_T
    held_T = ratio_T.clamp(1 - low, 1 + high) * advantages_T
    return PolicyLoss(loss_T=-free_T.minimum(held_T), clipped_T=(held_T < free_T).to(free_T.dtype))


def ppo_clip(scored: Scored, algorithm: AlgorithmSettings) -> PolicyLoss:
    """PPO's clipped objective (arXiv 1707.06347); two clips: DAPO (arXiv 2503.14476)."""
    return compute_clipped_loss(
        scored.log_ratio_T().exp(), scored.advantages_T, algorithm.clip_low, algorithm.clip_high
    )


def dual_clip(scored: Scored, algorithm: AlgorithmSettings) -> PolicyLoss:
    """PPO's loss, limited to dual_clip.ratio |A| if A < 0: a bad token that became likely can't dominate a batch (arXiv
    1912.09729).
    """
    policy = ppo_clip(scored, algorithm)
    most_T = (-algorithm.dual_clip.ratio * scored.advantages_T).masked_fill(scored.advantages_T >= 0, math.inf)
    capped_T = (policy.loss_T > most_T).to(policy.loss_T.dtype)
    return PolicyLoss(loss_T=policy.loss_T.minimum(most_T), clipped_T=policy.clipped_T.maximum(capped_T))


def gspo(scored: Scored, algorithm: AlgorithmSettings) -> PolicyLoss:
    """One ratio per rollout, s = exp(mean log r), clipped as in PPO (arXiv 2507.18071, eq. 5). Every token has the loss
    of its rollout and the mean of its advantages: the paper's aggregation is sequence_mean.
    """
    mask_T, lengths_S = scored.loss_mask_T, scored.sequence_lengths_S
    ratio_S = scored.mean_log_ratio_S().exp()
    advantages_S = mean_by_sequence(scored.advantages_T, mask_T, lengths_S)
    policy = compute_clipped_loss(ratio_S, advantages_S, algorithm.clip_low, algorithm.clip_high)
    return PolicyLoss(loss_T=to_tokens(policy.loss_T, lengths_S), clipped_T=to_tokens(policy.clipped_T, lengths_S))


def gspo_token(scored: Scored, algorithm: AlgorithmSettings) -> PolicyLoss:
    """The value of s with the token's own gradient, and an advantage per token (GSPO, eq. 13)."""
    ratio_S = scored.mean_log_ratio_S().exp().detach()
    own_T = (scored.logprobs_T - scored.logprobs_T.detach()).exp()  # value 1, with the token's gradient
    ratio_T = to_tokens(ratio_S, scored.sequence_lengths_S) * own_T
    return compute_clipped_loss(ratio_T, scored.advantages_T, algorithm.clip_low, algorithm.clip_high)


def cispo(scored: Scored, algorithm: AlgorithmSettings) -> PolicyLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: clips the weight and keeps the gradient (arXiv 2506.13585)."""
    ratio_T = scored.log_ratio_T().exp().detach()
    held_T = ratio_T.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss_T = -held_T * scored.advantages_T * scored.logprobs_T
    return PolicyLoss(loss_T=loss_T, clipped_T=(held_T != ratio_T).to(loss_T.dtype))


def sapo(scored: Scored, algorithm: AlgorithmSettings) -> PolicyLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate in place of the clip (SAPO, arXiv 2511.20347), whose gradient at
    r = 1 is that of r A, and falls off on both sides. tau: temperature_pos if A > 0, else temperature_neg.
    """
    gates, ratio_T = algorithm.sapo, scored.log_ratio_T().exp()
    is_good_T = (scored.advantages_T > 0).to(ratio_T.dtype)
    tau_T = is_good_T * gates.temperature_pos + (1 - is_good_T) * gates.temperature_neg
    loss_T = -scored.advantages_T * (tau_T * (ratio_T - 1)).sigmoid() * 4 / tau_T
    return PolicyLoss(loss_T=loss_T, clipped_T=loss_T.new_zeros(loss_T.shape))


def policy_gradient(scored: Scored, algorithm: AlgorithmSettings) -> PolicyLoss:
    """-A log pi (REINFORCE)."""
    loss_T = -scored.advantages_T * scored.logprobs_T
    return PolicyLoss(loss_T=loss_T, clipped_T=loss_T.new_zeros(loss_T.shape))


Loss = Callable[[Scored, AlgorithmSettings], PolicyLoss]


# -- KL to the reference ---------------------------------------------------------------------------------------------


MOST_K3_NATS = 10.0  # a token; reached where it is 14 times as likely to the reference, or 60,000 times less
K3_BEND = 2.6108686381498756  # the x above 0 at which e^x - x - 1 is MOST_K3_NATS


def k1_kl(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """log pi_theta - log pi_ref: unbiased in value; may be negative."""
    return logprobs_T - reference_logprobs_T


def k2_kl(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """(log pi_theta - log pi_ref)^2 / 2: biased in value; on-policy its gradient is that of the KL. Neither is bounded,
    as in verl: the gradient is log pi_theta - log pi_ref itself, and counts most where the two differ most.
    """
    return (logprobs_T - reference_logprobs_T).square() / 2


def k3_kl(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """e^x - x - 1 with x = log pi_ref - log pi_theta: unbiased in value, never negative (joschu.net/blog/kl-approx).

    At most MOST_K3_NATS, as in verl: at x = 20 it would be 5e8, and one token would be the whole batch. Unlike there,
    tokens beyond keep a gradient: they are the furthest from the reference. That of a token which became likely is at
    most 1 and stays exact; that of one which became unlikely stays what it is at K3_BEND, 12.6.
    """
    x_T = reference_logprobs_T - logprobs_T
    held_T = x_T.clamp(max=K3_BEND)
    straight_T = held_T.exp() + math.exp(K3_BEND) * (x_T - held_T) - x_T - 1  # goes on in a line from the bend on
    return straight_T + (straight_T.clamp(max=MOST_K3_NATS) - straight_T).detach()


Kl = Callable[["Tensor", "Tensor"], "Tensor"]


# -- from tokens to a batch ------------------------------------------------------------------------------------------


def by_token(loss_mask_T: Tensor, sequence_lengths_S: Tensor) -> Tensor:
    """Every trained token has weight 1."""
    return loss_mask_T


def by_sequence(loss_mask_T: Tensor, sequence_lengths_S: Tensor) -> Tensor:
    """Every rollout weighs the same: a trained token has weight 1 / (trained tokens of its rollout)."""
    return loss_mask_T / to_tokens(sum_by_sequence(loss_mask_T, sequence_lengths_S).clamp(min=1), sequence_lengths_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """How token losses are averaged. weigh: (loss_mask_T, sequence_lengths_S) -> weights_T. denominator: (totals,
    max_new_tokens) -> divisor.
    """

    weigh: Callable[[Tensor, Tensor], Tensor]
    denominator: Callable[[BatchTotals, int], float]


TOKEN_MEAN = Aggregation(weigh=by_token, denominator=lambda totals, max_new_tokens: totals.num_loss_tokens)
SEQUENCE_MEAN = Aggregation(weigh=by_sequence, denominator=lambda totals, max_new_tokens: totals.num_sequences)
# Dr.GRPO: a constant, so that long answers aren't weighed down.
CONSTANT = Aggregation(weigh=by_token, denominator=lambda totals, max_new_tokens: totals.num_sequences * max_new_tokens)
