"""From the log-probs of a micro-batch to the number that is back-propagated. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from grmpipe.algorithm.corrections import (
    Correction,
    OffPolicyDrift,
    Rejection,
    check_tensor,
    interpolate_proximal,
    log_ratio,
    measure_drift,
)
from grmpipe.algorithm.distillation import Taught, distillation_loss
from grmpipe.algorithm.losses import Aggregation, Kl, Loss, Scored, find_loss, policy_loss
from grmpipe.algorithm.sequences import to_tokens
from grmpipe.config.algorithm_tables import AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, KL_WEIGHTED, PROXIMALS, REJECTIONS
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedLoss:
    """The loss of a micro-batch. `total` is weighted for the batch's denominator; `sums` are plain sums over trained
    tokens, for metrics.
    """

    total: Tensor
    sums: dict[str, Tensor]
    abs_log_ratios_N: Tensor  # |log pi_old - log mu| of the N trained tokens


Term = tuple[float, Tensor, dict[str, Tensor]]  # its coefficient, its value by token, and what is watched of it


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss of an algorithm. Its parts are found by their names once, where a learner is made."""

    algorithm: AlgorithmConfig
    loss: Loss
    proximal: Proximal
    correction: Correction
    rejections: tuple[Rejection, ...]
    kl: Kl
    aggregation: Aggregation

    @staticmethod
    def of(algorithm: AlgorithmConfig) -> Objective:
        """Raises ValueError, which begins with the key, for a part that can't be imported on this machine."""
        return Objective(
            algorithm=algorithm,
            loss=find_loss(algorithm.loss),
            proximal=cast(Proximal, PROXIMALS.find_object(algorithm.proximal)),
            correction=cast(Correction, CORRECTIONS.find_object(algorithm.correction)),
            rejections=tuple(cast(Rejection, REJECTIONS.find_object(name)) for name in algorithm.rejections),
            kl=cast(Kl, KL_ESTIMATORS.find_object(algorithm.kl_estimator)),
            aggregation=AGGREGATIONS.find_object(algorithm.aggregation, Aggregation),
        )

    def sum_loss(
        self, logprobs: TokenLogprobs, advantages_T: Tensor, loss_mask_T: Tensor, sequence_lengths_S: Tensor
    ) -> SummedLoss:
        """sum of weight_t (w_t policy_t + beta kl_t + delta distill_t - eta entropy_t); w_t corrects for the sampler
        and has no gradient.

        Rejected tokens have w_t = 0 and still count in the batch's denominator.
        """
        current_T, algorithm = logprobs.current_T, self.algorithm
        mask_T = loss_mask_T.to(current_T.dtype)
        proximal_T = check_tensor("proximal", self.proximal, current_T, logprobs)
        scored = Scored(
            logprobs_T=current_T,
            proximal_T=proximal_T,
            advantages_T=advantages_T,
            loss_mask_T=mask_T,
            sequence_lengths_S=sequence_lengths_S,
        )
        policy = policy_loss(self.loss, scored, algorithm)
        drift = measure_drift(proximal_T, current_T, logprobs.sampler_T, advantages_T, mask_T, sequence_lengths_S)
        kept_T, correction_T = self.keep(drift), self.correct(drift)
        loss_T = kept_T * correction_T * policy.loss_T
        watched = {
            "tokens": torch.ones_like(mask_T),
            "clip_share": policy.clipped_T,
            "correction_mean": correction_T,
            "rejected_share": 1 - kept_T,
            "entropy_nats": logprobs.entropy_T,
        }
        for coefficient, term_T, seen in (
            self.regularise(logprobs),
            distill(logprobs, kept_T * correction_T, algorithm.distill),
        ):
            watched |= seen
            if coefficient > 0:
                loss_T = loss_T + coefficient * term_T
        if algorithm.entropy_coefficient > 0:
            loss_T = loss_T - algorithm.entropy_coefficient * logprobs.entropy_T
        weights_T = self.aggregation.weigh(mask_T, sequence_lengths_S)
        return SummedLoss(
            total=(weights_T * loss_T).sum(),
            sums={name: (value_T.detach() * mask_T).sum() for name, value_T in watched.items()},
            abs_log_ratios_N=log_ratio(logprobs.old_T, logprobs.sampler_T).abs()[loss_mask_T > 0],
        )

    def correct(self, drift: OffPolicyDrift) -> Tensor:
        """[T]: what weighs the policy loss of each token, by `algorithm.correction`."""
        return check_tensor("correction", self.correction, drift.log_weights_T, drift, self.algorithm)

    def keep(self, drift: OffPolicyDrift) -> Tensor:
        """[T]: 1 for the tokens of rollouts that every rejection keeps, else 0."""
        if not self.rejections:
            return torch.ones_like(drift.log_weights_T)
        kept_S = torch.ones_like(drift.sequence_lengths_S, dtype=torch.bool)
        for rejection in self.rejections:
            kept_S &= check_tensor("rejections", rejection, drift.sequence_lengths_S, drift, self.algorithm).bool()
        return to_tokens(kept_S, drift.sequence_lengths_S).to(drift.log_weights_T.dtype)

    def regularise(self, logprobs: TokenLogprobs) -> Term:
        """The KL to the reference, if there is one."""
        current_T, reference_T = logprobs.current_T, logprobs.reference_T
        if reference_T is None:
            return 0.0, current_T, {}
        kl_T = check_tensor("kl_estimator", self.kl, current_T, current_T, reference_T)
        if self.algorithm.kl_estimator in KL_WEIGHTED:  # unbiased, in its gradient too (DeepSeek-V3.2)
            kl_T = log_ratio(current_T, logprobs.sampler_T).exp() * kl_T
        return self.algorithm.kl_coefficient, kl_T, {"kl_nats": kl_T}
