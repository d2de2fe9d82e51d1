"""Corrections for the difference between sampler and trainer: weights, rejections, metrics of the mismatch. Pure.

mu: the engine's distribution when it sampled. pi_old: the trainer's, of the weights that the update starts from.
pi_prox: the policy that the loss's ratio is taken against. w = pi_prox / mu. T: tokens of the loss, S:
sequences; a rollout is one. Imports no torch, so that the table of parts costs nothing: methods of tensors do it all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grmpipe.algorithm.sequences import mean_by_sequence, sum_by_sequence, to_tokens
from grmpipe.algorithm.settings import AlgorithmSettings

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0  # e^20 is 5e8: a larger ratio is a fault, and must not become inf
BAND_LOG_RATIO = 0.0953  # ln 1.1: a token's probability differs by more than a tenth
OLDEST_AGE = 5  # this age and all older ones share a name


def log_ratio(numerator_T: Tensor, denominator_T: Tensor) -> Tensor:
    """log p - log q per token, within +-20."""
    return (numerator_T - denominator_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# -- the proximal policy ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What a teacher gives to each token, and the policy's log-probs of the same tokens.

    taught_T:       1 where a teacher scored the token, 0 elsewhere.
    logprobs_T:     the teacher's, of the sampled token.
    top_TK, own_top_TK: log-probs of the teacher's likely tokens, by the teacher and, with gradient, by the policy;
                    None: only the sampled token is compared.
    """

    taught_T: Tensor
    logprobs_T: Tensor
    top_TK: Tensor | None = None
    own_top_TK: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The log-probs of each token under each policy. T: tokens of the loss, end to end by rollout."""

    current_T: Tensor  # with gradient
    entropy_T: Tensor
    old_T: Tensor  # under the weights at the start of the update
    sampler_T: Tensor  # as the engine reported them
    reference_T: Tensor | None  # under the frozen reference, if there is one
    ages_T: Tensor  # batches trained since the token was sampled
    taught: Taught | None = None  # by teachers, if any scored these tokens


def interpolate_proximal(logprobs_T: Tensor, sampler_logprobs_T: Tensor, ages_T: Tensor) -> Tensor:
    """log pi_prox between the sampler's and the current policy, one version before the current one: log mu + (d - 1) /
    d (log pi_theta - log mu) at age d, log mu at age 0 (AReaL's log-linear approximation).
    """
    share_T = (ages_T - 1).clamp(min=0).to(logprobs_T.dtype) / ages_T.clamp(min=1)
    return sampler_logprobs_T + share_T * (logprobs_T.detach() - sampler_logprobs_T)


# log pi_prox, the policy that the loss's ratio is taken against, without gradient.
Proximal = Callable[[TokenLogprobs], "Tensor"]


def take_recomputed(logprobs: TokenLogprobs) -> Tensor:
    return logprobs.old_T


def interpolate_by_age(logprobs: TokenLogprobs) -> Tensor:
    return interpolate_proximal(logprobs.current_T, logprobs.sampler_T, logprobs.ages_T)


def sampler(logprobs: TokenLogprobs) -> Tensor:
    return logprobs.sampler_T


# -- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyDrift:
    """How far the policy is from the policy that sampled. No gradient goes through it."""

    log_weights_T: Tensor  # log w, within +-20, 0 for untrained tokens
    log_behind_T: Tensor  # log mu - log pi_theta, 0 for untrained tokens
    advantages_T: Tensor
    loss_mask_T: Tensor
    sequence_lengths_S: Tensor

    def product_S(self) -> Tensor:
        """log of the product of w over each rollout, within +-20. It grows with the length: 1.1 a token is 13 780 at
        100 tokens.
        """
        return sum_by_sequence(self.log_weights_T, self.sequence_lengths_S).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def measure_drift(
    proximal_T: Tensor,
    current_T: Tensor,
    sampler_T: Tensor,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    sequence_lengths_S: Tensor,
) -> OffPolicyDrift:
    return OffPolicyDrift(
        log_weights_T=(log_ratio(proximal_T, sampler_T) * loss_mask_T).detach(),
        log_behind_T=(log_ratio(sampler_T, current_T) * loss_mask_T).detach(),
        advantages_T=advantages_T,
        loss_mask_T=loss_mask_T,
        sequence_lengths_S=sequence_lengths_S,
    )


def apply_no_correction(drift: OffPolicyDrift, algorithm: AlgorithmSettings) -> Tensor:
    return drift.log_weights_T.new_ones(drift.log_weights_T.shape)


def truncate_importance(drift: OffPolicyDrift, algorithm: AlgorithmSettings) -> Tensor:
    """TIS: min(w, cap) per token, and at least the floor."""
    return drift.log_weights_T.exp().clamp(algorithm.tis.floor, algorithm.tis.cap)


def truncate_sequence(drift: OffPolicyDrift, algorithm: AlgorithmSettings) -> Tensor:
    """Sequence TIS: min(product of w, cap), for all tokens of a rollout."""
    return to_tokens(drift.product_S().exp().clamp(max=algorithm.sequence.cap), drift.sequence_lengths_S)


def mask_sequence(drift: OffPolicyDrift, algorithm: AlgorithmSettings) -> Tensor:
    """Sequence MIS: the product of w up to the cap, 0 above it."""
    weights_S = drift.product_S().exp()
    return to_tokens(weights_S * (weights_S <= algorithm.sequence.cap), drift.sequence_lengths_S)


def icepop(drift: OffPolicyDrift, algorithm: AlgorithmSettings) -> Tensor:
    """w within the band, 0 outside, per token."""
    weights_T = drift.log_weights_T.exp()
    return weights_T * ((weights_T >= algorithm.icepop.low) & (weights_T <= algorithm.icepop.high))


def mask_tokens(drift: OffPolicyDrift, algorithm: AlgorithmSettings) -> Tensor:
    """Decoupled PPO (arXiv 2505.24298): w up to the cap, 0 above it, per token."""
    weights_T = drift.log_weights_T.exp()
    return weights_T * (weights_T <= algorithm.decoupled.cap)


Correction = Callable[[OffPolicyDrift, AlgorithmSettings], "Tensor"]


# -- rollouts that are not trained -----------------------------------------------------------------------------------


def geometric(drift: OffPolicyDrift, algorithm: AlgorithmSettings) -> Tensor:
    """Keep a rollout iff low <= exp(mean log w) <= high: a test that doesn't grow with the length."""
    mean_S = mean_by_sequence(drift.log_weights_T, drift.loss_mask_T, drift.sequence_lengths_S).exp()
    return (mean_S >= algorithm.geometric.low) & (mean_S <= algorithm.geometric.high)


def veto(drift: OffPolicyDrift, algorithm: AlgorithmSettings) -> Tensor:
    """Keep a rollout iff no token of it has a w below: the trainer would never have said that."""
    hits_T = (drift.log_weights_T.exp() < algorithm.veto.below).to(drift.loss_mask_T.dtype)
    return sum_by_sequence(hits_T, drift.sequence_lengths_S) == 0


def off_policy(drift: OffPolicyDrift, algorithm: AlgorithmSettings) -> Tensor:
    """Keep a rollout unless A < 0 and mean(log mu - log pi_theta) > delta: what was bad and is unlikely by now teaches
    nothing more (DeepSeek-V3.2, arXiv 2512.02556). A is the mean over the rollout."""
    behind_S = mean_by_sequence(drift.log_behind_T, drift.loss_mask_T, drift.sequence_lengths_S)
    advantage_S = mean_by_sequence(drift.advantages_T, drift.loss_mask_T, drift.sequence_lengths_S)
    return ~((advantage_S < 0) & (behind_S > algorithm.off_policy.delta))


Rejection = Callable[[OffPolicyDrift, AlgorithmSettings], "Tensor"]  # -> [S] bool: kept


# -- metrics ---------------------------------------------------------------------------------------------------------


def mismatch(abs_log_ratios_N: Tensor, area: str = "mismatch") -> dict[str, float]:
    """Metrics of |log pi_old - log mu| over N trained tokens: mean, 95th percentile, maximum, share above 10 %.

    A growing mean points to numerics or staleness; a high maximum alone is one unlikely token; a share near 1 means
    that the engine's weights differ from the learner's.
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
    """The same metrics for the tokens of each age (batches trained since they were sampled), and the share of that age.

    Age 0 shows numerics, and keys and values of older weights if an engine keeps them over a push: a large mismatch
    there means that the engine computes something else than the learner. A mismatch that grows with age is staleness.
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
