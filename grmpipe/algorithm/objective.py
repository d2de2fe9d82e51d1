"""From the log-probs of a micro-batch to the number that is back-propagated. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from grmpipe.algorithm.corrections import check_tensor, correction, interpolate_proximal, kept, log_ratio, measure_drift
from grmpipe.algorithm.distillation import Taught, distillation_loss
from grmpipe.algorithm.losses import Aggregation, Scored, find_loss, kl, policy_loss
from grmpipe.config.algorithm_tables import AGGREGATIONS, KL_WEIGHTED, ONE_OF_EACH, PROXIMALS, REJECTIONS
from grmpipe.config.distill import DistillConfig
from grmpipe.config.train import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The log-probs of each token under each policy. T: tokens of the loss, end to end by rollout."""

    current_T: Tensor  # with gradient
    entropy_T: Tensor
    old_T: Tensor  # of the weights at the start of the update
    sampler_T: Tensor  # as the engine reported them
    reference_T: Tensor | None  # of the frozen reference, if there is one
    ages_T: Tensor  # batches trained since the token was sampled
    taught: Taught | None = None  # by teachers, if any scored these tokens


# log pi_prox, the policy that the loss's ratio is taken against, without gradient.
Proximal = Callable[[TokenLogprobs], Tensor]


def take_recomputed(logprobs: TokenLogprobs) -> Tensor:
    return logprobs.old_T


def interpolate_by_age(logprobs: TokenLogprobs) -> Tensor:
    return interpolate_proximal(logprobs.current_T, logprobs.sampler_T, logprobs.ages_T)


def sampler(logprobs: TokenLogprobs) -> Tensor:
    return logprobs.sampler_T


def import_functions(algorithm: AlgorithmConfig) -> None:
    """Raises ValueError, which begins with the key, for a part that can't be imported on this machine."""
    find_loss(algorithm.loss)
    for table in ONE_OF_EACH:
        table.find_object(getattr(algorithm, table.name))
    for name in algorithm.rejections:
        REJECTIONS.find_object(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedLoss:
    """The loss of a micro-batch. `total` is weighted for the batch's denominator; `sums` are plain sums over trained
    tokens, for metrics.
    """

    total: Tensor
    sums: dict[str, Tensor]
    abs_log_ratios_N: Tensor  # |log pi_old - log mu| of the N trained tokens


Term = tuple[float, Tensor, dict[str, Tensor]]  # its coefficient, its value by token, and what is watched of it


def regularise(logprobs: TokenLogprobs, algorithm: AlgorithmConfig) -> Term:
    """The KL to the reference, if there is one."""
    current_T, reference_T = logprobs.current_T, logprobs.reference_T
    if reference_T is None:
        return 0.0, current_T, {}
    kl_T = kl(algorithm.kl_estimator, current_T, reference_T)
    if algorithm.kl_estimator in KL_WEIGHTED:  # DeepSeek-V3.2 (arXiv 2512.02556): unbiased, in its gradient too
        kl_T = log_ratio(current_T, logprobs.sampler_T).exp() * kl_T
    return algorithm.kl_coefficient, kl_T, {"kl_nats": kl_T}


def distill(logprobs: TokenLogprobs, weight_T: Tensor, config: DistillConfig) -> Term:
    """The divergence from the teachers, if any scored these tokens. weight_T: of the policy loss of each token."""
    current_T, taught = logprobs.current_T, logprobs.taught
    if taught is None:
        return 0.0, current_T, {}
    loss_T = distillation_loss(current_T, weight_T, taught, config.beta)
    watched = {
        "distill_loss": loss_T,
        "distill_kl_nats": taught.taught_T * (current_T - taught.logprobs_T),
        "taught_share": taught.taught_T,
    }
    return config.coefficient if config.form == "loss" else 0.0, loss_T, watched


def sum_loss(
    logprobs: TokenLogprobs,
    advantages_T: Tensor,
    loss_mask_T: Tensor,
    sequence_lengths_S: Tensor,
    algorithm: AlgorithmConfig,
) -> SummedLoss:
    """sum of weight_t (w_t policy_t + beta kl_t + delta distill_t - eta entropy_t); w_t corrects for the sampler and
    has no gradient.

    Rejected tokens have w_t = 0 and still count in the batch's denominator.
    """
    current_T = logprobs.current_T
    mask_T = loss_mask_T.to(current_T.dtype)
    proximal = cast(Proximal, PROXIMALS.find_object(algorithm.proximal))
    proximal_T = check_tensor("proximal", proximal, current_T, logprobs)
    scored = Scored(
        logprobs_T=current_T,
        proximal_T=proximal_T,
        advantages_T=advantages_T,
        loss_mask_T=mask_T,
        sequence_lengths_S=sequence_lengths_S,
    )
    policy = policy_loss(scored, algorithm)
    drift = measure_drift(proximal_T, current_T, logprobs.sampler_T, advantages_T, mask_T, sequence_lengths_S)
    kept_T = kept(drift, algorithm)
    correction_T = correction(drift, algorithm)
    loss_T = kept_T * correction_T * policy.loss_T
    watched = {
        "tokens": torch.ones_like(mask_T),
        "clip_share": policy.clipped_T,
        "correction_mean": correction_T,
        "rejected_share": 1 - kept_T,
        "entropy_nats": logprobs.entropy_T,
    }
    for coefficient, term_T, seen in (
        regularise(logprobs, algorithm),
        distill(logprobs, kept_T * correction_T, algorithm.distill),
    ):
        watched |= seen
        if coefficient > 0:
            loss_T = loss_T + coefficient * term_T
    if algorithm.entropy_coefficient > 0:
        loss_T = loss_T - algorithm.entropy_coefficient * logprobs.entropy_T
    weights_T = AGGREGATIONS.find_object(algorithm.aggregation, Aggregation).weigh(mask_T, sequence_lengths_S)
    return SummedLoss(
        total=(weights_T * loss_T).sum(),
        sums={name: (value_T.detach() * mask_T).sum() for name, value_T in watched.items()},
        abs_log_ratios_N=log_ratio(logprobs.old_T, logprobs.sampler_T).abs()[loss_mask_T > 0],
    )
