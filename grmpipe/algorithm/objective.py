"""From the log-probs of a micro-batch to the number that is back-propagated. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grmpipe.algorithm.corrections import (
    Correction,
    OffPolicyDrift,
    Proximal,
    Rejection,
    TokenLogprobs,
    log_ratio,
    measure_drift,
)
from grmpipe.algorithm.distill import DistillConfig
from grmpipe.algorithm.distillation import distillation_loss
from grmpipe.algorithm.losses import Aggregation, Kl, Loss, PolicyLoss, Scored
from grmpipe.algorithm.parts import (
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    KL_WEIGHTED,
    PROXIMALS,
    REJECTIONS,
    loss_named,
)
from grmpipe.algorithm.sequences import to_tokens
from grmpipe.algorithm.settings import AlgorithmSettings
from grmpipe.config.keys.user_code import describe_code, format_value, note_owner


def check_tensor(key: str, function: Callable[..., object], like: Tensor, *arguments: object) -> Tensor:
    """What the function that a key names returns: a tensor of the shape of `like`. Raises ValueError for anything else,
    which would be broadcast.
    """
    owner = f"algorithm.{key}: {describe_code(function)}"
    with note_owner(owner):
        given = function(*arguments)
    if not isinstance(given, Tensor) or given.shape != like.shape:
        what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else format_value(given)
        raise ValueError(f"{owner} returned {what}; return a tensor of shape {tuple(like.shape)}")
    return given


def policy_loss(loss: Loss, scored: Scored, algorithm: AlgorithmSettings) -> PolicyLoss:
    """The loss that `algorithm.loss` names. Raises ValueError if it doesn't return one number per token."""
    owner = f"algorithm.loss: {describe_code(loss)}"
    with note_owner(owner):
        policy = loss(scored, algorithm)
    if not isinstance(policy, PolicyLoss):
        raise ValueError(f"{owner} returned {format_value(policy)}; return a PolicyLoss (grmpipe/algorithm/losses.py)")
    for name, value_T in (("loss_T", policy.loss_T), ("clipped_T", policy.clipped_T)):
        if value_T.shape != scored.logprobs_T.shape:
            raise ValueError(
                f"{owner} gave a {name} of shape {tuple(value_T.shape)} for "
                f"{len(scored.logprobs_T)} tokens; it must give a number for each"
            )
    return policy


def kl(name: str, logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Estimated for each token by what `algorithm.kl_estimator` names."""
    function = KL_ESTIMATORS.find_object(name)
    return check_tensor("kl_estimator", function, logprobs_T, logprobs_T, reference_logprobs_T)


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
    """The divergence from the teachers, if any scored these tokens. weight_T: each token's in the policy loss."""
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

    algorithm: AlgorithmSettings
    loss: Loss
    proximal: Proximal
    correction: Correction
    rejections: tuple[Rejection, ...]
    kl: Kl
    aggregation: Aggregation

    @staticmethod
    def of(algorithm: AlgorithmSettings) -> Objective:
        """Raises ValueError, which begins with the key, for a part that can't be imported on this machine."""
        return Objective(
            algorithm=algorithm,
            loss=loss_named(algorithm.loss, "algorithm.loss").function,
            proximal=PROXIMALS.find_object(algorithm.proximal),
            correction=CORRECTIONS.find_object(algorithm.correction),
            rejections=tuple(REJECTIONS.find_object(name) for name in algorithm.rejections),
            kl=KL_ESTIMATORS.find_object(algorithm.kl_estimator),
            aggregation=AGGREGATIONS.find_object(algorithm.aggregation),
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
