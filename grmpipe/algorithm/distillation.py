"""Divergences of the policy from a teacher, for each token. Pure.

T: tokens of the loss, K: the teacher's most likely tokens in the place of each. All others are one more outcome, so
that both distributions are over K + 1 of them: a lower bound of the divergence over the whole vocabulary, equal to it
if K is the vocabulary.
"""

import math

import torch
from torch import Tensor

from grmpipe.algorithm.corrections import Taught
from grmpipe.algorithm.losses import k2_kl

LEAST_REST = 1e-7  # probability of all other tokens: what float32 leaves of 1 - sum


def distillation_loss(current_T: Tensor, correction_T: Tensor, taught: Taught, beta: float) -> Tensor:
    """[T]: the divergence at each taught token, 0 at the others.

    With the sampled token alone: log(pi / teacher)^2 / 2, times the weight w of the sampling policy. Its gradient,
    w log(pi / teacher) d log pi, is that of the reverse KL of the token's distribution in the mean over samples, where
    log(pi / teacher) itself has none.
    """
    if taught.top_TK is None or taught.own_top_TK is None:
        loss_T = correction_T * k2_kl(current_T, taught.logprobs_T)
    else:
        loss_T = divergence(taught.own_top_TK, taught.top_TK, beta)
    return torch.where(taught.taught_T > 0, loss_T, 0.0)


def divergence(own_TK: Tensor, teacher_TK: Tensor, beta: float) -> Tensor:
    """[T]: the generalized Jensen-Shannon divergence (GKD, arXiv 2306.13649, section 2): with the mixture
    m = beta teacher + (1 - beta) own, beta KL(teacher || m) + (1 - beta) KL(own || m). At 1 it is KL(own || teacher),
    at 0 KL(teacher || own), as in TRL.
    """
    own, teacher = with_rest(own_TK), with_rest(teacher_TK)
    if beta == 0:
        return kl_divergence(teacher, own)
    if beta == 1:
        return kl_divergence(own, teacher)
    mixture = torch.logaddexp(own + math.log1p(-beta), teacher + math.log(beta))
    return beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(own, mixture)


def kl_divergence(of: Tensor, to: Tensor) -> Tensor:
    """[T]: KL(of || to) of log-probs over the last dimension."""
    return (of.exp() * (of - to)).sum(-1)


def with_rest(logprobs_TK: Tensor) -> Tensor:
    """[T, K + 1]: log-probs with that of all other tokens together."""
    rest_T1 = (1 - logprobs_TK.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST)
    return torch.cat([logprobs_TK, rest_T1.log()], dim=-1)
