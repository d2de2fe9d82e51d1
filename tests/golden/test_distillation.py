"""Divergences from a teacher by their formulas, and gradients in the mean over samples."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from grmpipe.algorithm.corrections import Taught, TokenLogprobs
from grmpipe.algorithm.distill import DistillConfig
from grmpipe.algorithm.distillation import distillation_loss, divergence
from grmpipe.algorithm.objective import distill

# Two distributions over four tokens, as log-probs.
OWN = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
TEACHER = torch.tensor([[0.25, 0.25, 0.4, 0.1]], dtype=torch.float64).log()


def whole(own: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """TRL's generalized_jsd_loss, by its definition over the vocabulary."""
    if beta == 0:
        return (teacher.exp() * (teacher - own)).sum(-1)
    if beta == 1:
        return (own.exp() * (own - teacher)).sum(-1)
    mixture = torch.logsumexp(torch.stack([own + math.log(1 - beta), teacher + math.log(beta)]), dim=0)
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    return beta * of_teacher + (1 - beta) * (own.exp() * (own - mixture)).sum(-1)


def test_reverse_and_forward_kl_have_the_values_of_their_formulas() -> None:
    reverse = 0.5 * math.log(0.5 / 0.25) + 0.125 * math.log(0.125 / 0.4) + 0.125 * math.log(0.125 / 0.1)
    forward = 0.25 * math.log(0.25 / 0.5) + 0.4 * math.log(0.4 / 0.125) + 0.1 * math.log(0.1 / 0.125)
    assert divergence(OWN, TEACHER, 1.0).item() == pytest.approx(reverse, abs=1e-6)
    assert divergence(OWN, TEACHER, 0.0).item() == pytest.approx(forward, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_over_the_whole_vocabulary_values_and_gradients_are_those_of_the_definition(beta: float) -> None:
    random = torch.Generator().manual_seed(3)
    logits, others = (torch.randn(7, 30, generator=random, dtype=torch.float64) for _ in range(2))
    grads = []
    for measure in (divergence, whole):
        leaf = logits.clone().requires_grad_()
        value = measure(leaf.log_softmax(-1), others.log_softmax(-1), beta)
        value.sum().backward()
        grads.append((value.detach(), leaf.grad))
    torch.testing.assert_close(grads[0], grads[1], atol=2e-6, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_fewer_tokens_give_a_lower_bound_that_grows_with_their_number(beta: float) -> None:
    values = [divergence(OWN[:, :k], TEACHER[:, :k], beta).item() for k in (1, 2, 3, 4)]
    assert all(fewer <= more + 1e-6 for fewer, more in itertools.pairwise(values))
    assert values[-1] == pytest.approx(whole(OWN, TEACHER, beta).item(), abs=2e-6)


def test_of_the_sampled_token_the_mean_gradient_is_that_of_the_reverse_kl() -> None:
    exact = OWN.clone().requires_grad_()
    whole(exact.log_softmax(-1), TEACHER, 1.0).sum().backward()
    leaf, ones = OWN.clone().requires_grad_(), torch.ones(4, dtype=torch.float64)
    current = leaf.log_softmax(-1)[0]
    loss = distillation_loss(current, ones, Taught(taught_T=ones, logprobs_T=TEACHER[0]), beta=1.0)
    (OWN[0].exp() * loss).sum().backward()  # the mean over what the policy samples
    torch.testing.assert_close(leaf.grad, exact.grad)


def test_the_gradient_grows_with_the_disagreement_and_never_ends() -> None:
    """Of a token that the policy is sure of: foreign markup is 25 nats away from a teacher of another family."""
    gaps = [18.9, 19.95, 24.9, 60.0]
    current = torch.zeros(4, requires_grad=True)
    taught = Taught(taught_T=torch.ones(4), logprobs_T=-torch.tensor(gaps))
    distillation_loss(current, torch.ones(4), taught, beta=1.0).sum().backward()
    assert current.grad is not None and current.grad.tolist() == pytest.approx(gaps)
    logprobs = TokenLogprobs(
        current_T=current, entropy_T=current, old_T=current, sampler_T=current, reference_T=None, ages_T=current,
        taught=taught,
    )  # fmt: skip
    _, _, watched = distill(logprobs, torch.ones(4), DistillConfig(teachers={"default": "teacher"}))
    assert watched["distill_kl_nats"].tolist() == pytest.approx(gaps), "nor is the metric held"


def test_of_tokens_of_another_sampler_the_weighted_mean_gradient_is_that_of_the_reverse_kl() -> None:
    sampler = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    exact = OWN.clone().requires_grad_()
    whole(exact.log_softmax(-1), TEACHER, 1.0).sum().backward()
    leaf, ones = OWN.clone().requires_grad_(), torch.ones(4, dtype=torch.float64)
    weight = OWN[0].exp() / sampler
    loss = distillation_loss(leaf.log_softmax(-1)[0], weight, Taught(taught_T=ones, logprobs_T=TEACHER[0]), beta=1.0)
    (sampler * loss).sum().backward()
    torch.testing.assert_close(leaf.grad, exact.grad)


def test_a_token_that_no_teacher_scored_has_neither_loss_nor_gradient() -> None:
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    taught = Taught(taught_T=torch.tensor([0.0, 1.0]), logprobs_T=torch.tensor([0.0, -1.0]))
    loss = distillation_loss(current, torch.ones(2), taught, beta=1.0)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.5] and current.grad is not None and current.grad.tolist() == [0.0, -1.0]
