"""Losses and aggregation by the numbers of their formulas, and against numpy sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from grmpipe.algorithm.corrections import TokenLogprobs
from grmpipe.algorithm.losses import (
    PolicyLoss,
    Scored,
    cispo,
    dual_clip,
    gspo,
    gspo_token,
    k2_kl,
    k3_kl,
    policy_gradient,
    ppo_clip,
    sapo,
)
from grmpipe.algorithm.objective import Objective, kl, policy_loss
from grmpipe.algorithm.parts import AGGREGATIONS, KL_ESTIMATORS, LOSSES
from grmpipe.algorithm.settings import DualClip, Sapo
from grmpipe.config.train import AlgorithmConfig
from grmpipe.types import BatchTotals

TOTALS = BatchTotals(num_loss_tokens=5, num_sequences=2, num_groups=1, oldest_version=0)


def logs(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def scored(ratios: list[float], advantages: list[float], lengths: list[int] | None = None) -> Scored:
    """Tokens whose pi_theta / pi_prox is `ratios`, at pi_prox = 1; all trained. One sample unless `lengths` is
    given.
    """
    return Scored(
        logprobs_T=logs(*ratios).requires_grad_(),
        proximal_T=torch.zeros(len(ratios), dtype=torch.float64),
        advantages_T=torch.tensor(advantages, dtype=torch.float64),
        loss_mask_T=torch.ones(len(ratios), dtype=torch.float64),
        sequence_lengths_S=torch.tensor(lengths or [len(ratios)]),
    )


def clips(low: float = 0.2, high: float = 0.2) -> AlgorithmConfig:
    return AlgorithmConfig(clip_low=low, clip_high=high)


def gradient(tokens: Scored, policy: PolicyLoss) -> list[float]:
    policy.loss_T.sum().backward()
    assert tokens.logprobs_T.grad is not None
    return tokens.logprobs_T.grad.tolist()


def test_the_mean_log_ratio_of_a_rollout_is_held_within_20_though_its_tokens_are_not() -> None:
    """Of two tokens each: 30 and 16, mean 23; -30 and -16; 30 and -10, mean 10."""
    ratios = [math.exp(one) for one in (30.0, 16.0, -30.0, -16.0, 30.0, -10.0)]
    found_S = scored(ratios, [1.0] * 6, [2, 2, 2]).mean_log_ratio_S()
    assert found_S.tolist() == pytest.approx([20.0, -20.0, 10.0])


def one_for_all(tokens: Scored, algorithm: AlgorithmConfig) -> PolicyLoss:
    return PolicyLoss(loss_T=tokens.logprobs_T.sum(), clipped_T=torch.zeros(()))


def test_a_loss_that_gives_no_number_for_each_token_is_refused() -> None:
    """Otherwise it would be broadcast over all tokens."""
    with pytest.raises(ValueError, match=r"^algorithm\.loss: .*\.one_for_all \(.*\) gave a loss_T of shape \(\)"):
        policy_loss(one_for_all, scored([1.0, 1.0], [1, 1]), AlgorithmConfig())


def a_number(tokens: Scored, algorithm: AlgorithmConfig) -> float:
    return 0.5


def test_a_loss_that_returns_no_policy_loss_is_refused_by_key_function_and_line() -> None:
    with pytest.raises(
        ValueError, match=r"^algorithm\.loss: .*\.a_number \(.*:\d+\) returned 0\.5; return a PolicyLoss"
    ):
        policy_loss(a_number, scored([1.0, 1.0], [1, 1]), AlgorithmConfig())  # type: ignore[arg-type]


def test_ppo_clips_gains_and_keeps_losses() -> None:
    policy = ppo_clip(scored([0.5, 1.0, 1.5, 0.5, 1.0, 1.5], [1, 1, 1, -1, -1, -1]), clips(0.2, 0.28))
    assert policy.loss_T.tolist() == pytest.approx([-0.5, -1.0, -1.28, 0.8, 1.0, 1.5])
    assert policy.clipped_T.tolist() == [0, 0, 1, 1, 0, 0]


def test_a_clipped_token_has_no_gradient() -> None:
    tokens = scored([1.5, 1.1], [1, 1])
    assert gradient(tokens, ppo_clip(tokens, clips())) == pytest.approx([0.0, -1.1])


def test_dual_clip_bounds_what_was_bad_and_became_likely() -> None:
    """A < 0: the loss r |A| stops at 3 |A|. A > 0: as before."""
    tokens = scored([0.5, 2.0, 5.0, 5.0], [-2, -2, -2, 2])
    policy = dual_clip(tokens, AlgorithmConfig(dual_clip=DualClip(ratio=3.0)))
    assert policy.loss_T.tolist() == pytest.approx([1.6, 4.0, 6.0, -2.4])
    assert policy.clipped_T.tolist() == [1, 0, 1, 1]
    assert gradient(tokens, policy) == pytest.approx([0.0, 4.0, 0.0, 0.0])


def test_gspo_has_the_geometric_mean_of_a_sample() -> None:
    """Ratios 1.1 and 1.21 of one sample: s = 1.1^1.5; of the other 0.5 and 2: s = 1."""
    tokens = scored([1.1, 1.21, 0.5, 2.0], [2, 2, -1, -1], [2, 2])
    s = 1.1**1.5
    policy = gspo(tokens, clips())
    assert policy.loss_T.tolist() == pytest.approx([-2 * s, -2 * s, 1.0, 1.0])
    # d s / d log pi_t = s / |y|; both tokens of a sample have its loss.
    assert gradient(tokens, policy) == pytest.approx([-2 * s, -2 * s, 1.0, 1.0])


def test_gspo_clips_a_whole_sample() -> None:
    tokens = scored([1.001, 1.0, 1.0, 1.0005], [1, 1, 1, 1], [2, 2])
    policy = gspo(tokens, clips(3e-4, 4e-4))
    assert policy.clipped_T.tolist() == [1, 1, 0, 0]
    assert policy.loss_T[0].item() == pytest.approx(-(1 + 4e-4))
    assert gradient(tokens, policy)[:2] == [0.0, 0.0]


def test_gspo_does_not_count_what_is_not_trained() -> None:
    tokens = scored([9.0, 1.1, 1.21], [0, 1, 1])
    tokens.loss_mask_T[0] = 0.0
    assert gspo(tokens, clips(0.9, 0.9)).loss_T.tolist() == pytest.approx([-(1.1**1.5)] * 3)


@pytest.mark.parametrize("loss", [gspo, gspo_token])
def test_gspo_takes_a_token_that_is_far_off_as_it_is(loss: Callable[..., PolicyLoss]) -> None:
    """log r of 25 among 99 of 0: their mean is 0.25, and each token has its hundredth of the rollout's gradient."""
    tokens = scored([math.exp(25.0), *[1.0] * 99], [-1.0] * 100)
    policy = loss(tokens, clips())
    assert policy.loss_T.tolist() == pytest.approx([math.exp(0.25)] * 100)
    assert gradient(tokens, policy) == pytest.approx([math.exp(0.25)] * 100)


def test_gspo_token_with_equal_advantages_has_gspos_value_and_gradient() -> None:
    ratios, advantages, lengths = [1.1, 1.21, 0.5, 1.9, 1.0], [2.0, 2.0, -1.0, -1.0, -1.0], [2, 3]
    whole, by_token = scored(ratios, advantages, lengths), scored(ratios, advantages, lengths)
    first, second = gspo(whole, clips()), gspo_token(by_token, clips())
    assert second.loss_T.tolist() == pytest.approx(first.loss_T.tolist())
    assert gradient(by_token, second) == pytest.approx(gradient(whole, first))


def test_gspo_token_takes_an_advantage_for_each_token() -> None:
    tokens = scored([1.1, 1.21], [2.0, -1.0])
    s = 1.1**1.5
    assert gradient(tokens, gspo_token(tokens, clips())) == pytest.approx([-2 * s, s])


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    tokens = scored([0.5, 1.1, 3.0], [1.0, -2.0, 1.0])
    policy = cispo(tokens, clips(0.2, 0.28))
    assert policy.loss_T.tolist() == pytest.approx([-0.8 * math.log(0.5), 2.2 * math.log(1.1), -1.28 * math.log(3.0)])
    assert policy.clipped_T.tolist() == [1, 0, 1]
    assert gradient(tokens, policy) == pytest.approx([-0.8, 2.2, -1.28])


def test_the_plain_policy_gradient_has_no_ratio() -> None:
    tokens = scored([0.5, 3.0], [1.0, -2.0])
    policy = policy_gradient(tokens, clips())
    assert policy.loss_T.tolist() == pytest.approx([-math.log(0.5), 2 * math.log(3.0)])
    assert gradient(tokens, policy) == [-1.0, 2.0]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_every_loss_has_the_policy_gradient_and_clips_nothing(name: str) -> None:
    """At r = 1 all are -A grad log pi; every token has GSPO's, which is divided by their number."""
    tokens = scored([1.0, 1.0, 1.0], [1.5, 1.5, 1.5])
    policy = LOSSES[name].function(tokens, AlgorithmConfig(loss=name))
    assert gradient(tokens, policy) == pytest.approx([-1.5] * 3)
    assert policy.clipped_T.tolist() == [0.0] * 3 and policy.clipped_T.dtype == policy.loss_T.dtype


# -- against numpy ---------------------------------------------------------------------------------------------------


def numpy_loss(name: str, r: np.ndarray, logprobs: np.ndarray, a: np.ndarray) -> np.ndarray:
    """The losses of one sample, as the papers write them; clips 0.2 and 0.3, dual clip 3."""

    def clip(ratio: np.ndarray) -> np.ndarray:
        return -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.3) * a)

    s, tau = np.exp(np.log(r).mean()), np.where(a > 0, 1.0, 1.05)
    forms: dict[str, Callable[[], np.ndarray]] = {
        "ppo_clip": lambda: clip(r),
        "dual_clip": lambda: np.where(a < 0, -np.maximum(-clip(r), 3 * a), clip(r)),
        "gspo": lambda: np.full(len(r), -min(s * a.mean(), np.clip(s, 0.8, 1.3) * a.mean())),
        "gspo_token": lambda: clip(np.full(len(r), s)),
        "sapo": lambda: -a * 4 / tau / (1 + np.exp(-tau * (r - 1))),
        "cispo": lambda: -np.clip(r, 0.8, 1.3) * a * logprobs,
        "policy_gradient": lambda: -a * logprobs,
    }
    return forms[name]()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_loss_is_numpys_sample_by_sample(name: str) -> None:
    draw, lengths = np.random.default_rng(1), [4, 1, 7]
    logprobs, proximal, advantages = draw.normal(-1, 0.6, 12), draw.normal(-1, 0.6, 12), draw.normal(size=12)
    tokens = Scored(
        logprobs_T=torch.from_numpy(logprobs),
        proximal_T=torch.from_numpy(proximal),
        advantages_T=torch.from_numpy(advantages),
        loss_mask_T=torch.ones(12, dtype=torch.float64),
        sequence_lengths_S=torch.tensor(lengths),
    )
    ours = LOSSES[name].function(
        tokens, AlgorithmConfig(loss=name, clip_low=0.2, clip_high=0.3, dual_clip=DualClip(ratio=3.0))
    )
    parts = zip(*(np.split(x, np.cumsum(lengths)[:-1]) for x in (logprobs, proximal, advantages)), strict=True)
    expected = [numpy_loss(name, np.exp(lp - prox), lp, a) for lp, prox, a in parts]
    np.testing.assert_allclose(ours.loss_T.numpy(), np.concatenate(expected), atol=1e-12)


# -- KL --------------------------------------------------------------------------------------------------------------


def test_kl_estimators_equal_their_formulas() -> None:
    """pi_theta / pi_ref of 1, 1/2, 2."""
    found = {name: kl(name, logs(1.0, 0.5, 2.0), logs(1.0, 1.0, 1.0)).tolist() for name in KL_ESTIMATORS}
    log2 = math.log(2)
    assert found["k1"] == pytest.approx([0.0, -log2, log2])
    assert found["k2"] == pytest.approx([0.0, log2**2 / 2, log2**2 / 2])
    assert found["k3"] == pytest.approx([0.0, 2 - log2 - 1, 0.5 + log2 - 1])


def test_k3_of_one_token_is_at_most_10_nats() -> None:
    """In both directions; below that it is exact. Above it the gradient stays: as it is where the token became likely,
    and as it is at 10 nats where it became unlikely.
    """
    logprobs = torch.tensor([-50.0, -3.0, -0.0, -2.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, -0.3, -15.0, 0.0], dtype=torch.float64)
    found = kl("k3", logprobs, reference)
    assert found.tolist() == pytest.approx([10.0, 10.0, 10.0, math.exp(2.5) - 3.5])
    found.sum().backward()
    assert logprobs.grad is not None
    steepest = -math.exp(2.6108686) + 1
    assert logprobs.grad.tolist() == pytest.approx([steepest, steepest, 1 - math.exp(-15), 1 - math.exp(2.5)])


def test_of_k1_and_k2_value_and_gradient_grow_with_the_distance_without_a_bound() -> None:
    logprobs = torch.tensor([-30.0, -0.1], requires_grad=True)
    reference = torch.tensor([-0.1, -26.6])
    assert kl("k1", logprobs, reference).tolist() == pytest.approx([-29.9, 26.5])
    kl("k2", logprobs, reference).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-29.9, 26.5])


P, Q = logs(0.7, 0.2, 0.1), logs(0.5, 0.3, 0.2)
KL_P_Q = float((P.exp() * (P - Q)).sum())


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_in_value(name: str) -> None:
    assert (P.exp() * kl(name, P, Q)).sum().item() == pytest.approx(KL_P_Q)


def test_in_the_loss_k2_has_the_gradient_of_the_kl_and_k1_has_none() -> None:
    """On-policy: expectations under a fixed p, over a softmax's logits."""
    for name in ("exact", "k1", "k2"):
        logits = P.clone().requires_grad_()
        p = logits.log_softmax(-1)
        loss = (p.exp() * (p - Q)).sum() if name == "exact" else (P.exp() * kl(name, p, Q)).sum()
        loss.backward()
        assert logits.grad is not None
        if name == "exact":
            exact = logits.grad
        else:
            torch.testing.assert_close(logits.grad, exact if name == "k2" else torch.zeros_like(exact))


def test_an_impossible_log_ratio_stays_finite() -> None:
    far = torch.tensor([-1e4, 1e4])
    for estimator in (k2_kl, k3_kl):
        assert estimator(far, torch.zeros(2)).isfinite().all()
    tokens = Scored(
        logprobs_T=far,
        proximal_T=torch.zeros(2),
        advantages_T=torch.ones(2),
        loss_mask_T=torch.ones(2),
        sequence_lengths_S=torch.tensor([2]),
    )
    for name in LOSSES:
        assert LOSSES[name].function(tokens, AlgorithmConfig(loss=name)).loss_T.isfinite().all()


# -- aggregation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights", "denominator"),
    [
        ("token_mean", [0, 1, 0, 1, 1, 1, 1], 5),
        ("sequence_mean", [0, 1, 0, 0.25, 0.25, 0.25, 0.25], 2),
        ("constant", [0, 1, 0, 1, 1, 1, 1], 2 * 16),
    ],
)
def test_an_aggregation_weighs_tokens_and_divides_by_its_denominator(
    name: str, weights: list[float], denominator: float
) -> None:
    mask = torch.tensor([0, 1, 0, 1, 1, 1, 1.0])
    assert AGGREGATIONS[name].weigh(mask, torch.tensor([2, 5])).tolist() == weights
    assert AGGREGATIONS[name].denominator(TOTALS, 16) == denominator


def test_sequence_mean_of_an_untrained_sample_is_zero() -> None:
    sequence_mean = AGGREGATIONS["sequence_mean"]
    assert sequence_mean.weigh(torch.zeros(3), torch.tensor([1, 2])).tolist() == [0, 0, 0]


def test_sapo_is_a_soft_gate_with_a_temperature_by_the_sign_of_the_advantage() -> None:
    """Values by hand: at r = 1 the gradient is that of r A, and it falls off on both sides."""
    r = np.array([1.0, 2.0, 2.0, 0.5])
    a = np.array([1.0, 1.0, -1.0, -2.0])
    logprobs = torch.tensor(np.log(r), requires_grad=True)
    tokens = Scored(
        logprobs_T=logprobs,
        proximal_T=torch.zeros(4, dtype=torch.float64),
        advantages_T=torch.tensor(a),
        loss_mask_T=torch.ones(4, dtype=torch.float64),
        sequence_lengths_S=torch.tensor([4]),
    )
    cold = sapo(tokens, AlgorithmConfig(loss="sapo", sapo=Sapo(temperature_pos=2.0))).loss_T.detach().numpy()
    np.testing.assert_allclose(cold[:2], -4 / 2 / (1 + np.exp(-2 * (r[:2] - 1))), rtol=1e-12)
    loss = sapo(tokens, AlgorithmConfig(loss="sapo")).loss_T
    tau = np.where(a > 0, 1.0, 1.05)
    gate = 1 / (1 + np.exp(-tau * (r - 1)))
    np.testing.assert_allclose(loss.detach().numpy(), -a * gate * 4 / tau, rtol=1e-12)
    loss.sum().backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), -a * 4 * gate * (1 - gate) * r, rtol=1e-12)
    assert logprobs.grad[0] == pytest.approx(-1.0)


def test_the_unbiased_kl_has_value_and_gradient_of_the_kl_in_the_mean_over_another_sampler() -> None:
    own, reference, sampler = logs(0.5, 0.3, 0.2), logs(0.2, 0.3, 0.5), logs(0.1, 0.2, 0.7)
    exact, leaf = own.clone().requires_grad_(), own.clone().requires_grad_()
    (exact.exp() * (exact - reference)).sum().backward()
    current, ones = leaf + 0.0, torch.ones(3, dtype=torch.float64)
    logprobs = TokenLogprobs(
        current_T=current,
        entropy_T=torch.zeros(3, dtype=torch.float64),
        old_T=own,
        sampler_T=sampler,
        reference_T=reference,
        ages_T=torch.zeros(3),
    )
    objective = Objective.of(AlgorithmConfig(kl_coefficient=1.0, kl_estimator="k3_unbiased"))
    found = [
        objective.sum_loss(logprobs, 0 * ones, torch.eye(3, dtype=torch.float64)[token], torch.tensor([3])).total
        for token in range(3)
    ]
    mean = sum(sampler[token].exp() * loss for token, loss in enumerate(found))
    assert float(mean.detach()) == pytest.approx(float((own.exp() * (own - reference)).sum()))
    mean.backward()
    # Of distributions: what is left of both gradients after the part that keeps the sum of probabilities.
    for grad in (exact.grad, leaf.grad):
        assert grad is not None
        grad -= own.exp() * grad.sum()
    torch.testing.assert_close(leaf.grad, exact.grad)
