"""Losses, corrections and aggregation by their formula's own numbers."""

from __future__ import annotations

import math

import pytest
import torch

from grmpipe.train.corrections import mismatch, mismatch_by_age, truncated_importance
from grmpipe.train.losses import AGGREGATIONS, k3_kl, ppo_clip
from grmpipe.types import BatchTotals

TOTALS = BatchTotals(num_loss_tokens=5, num_sequences=2, num_groups=1, oldest_version=0)


def ratios(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def test_ppo_clips_gains_and_keeps_losses() -> None:
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    policy = ppo_clip(ratios(0.5, 1.0, 1.5, 0.5, 1.0, 1.5), ratios(1, 1, 1, 1, 1, 1), advantages, 0.2, 0.28)
    assert policy.loss_T.tolist() == pytest.approx([-0.5, -1.0, -1.28, 0.8, 1.0, 1.5])
    assert policy.clipped_T.tolist() == [0, 0, 1, 1, 0, 0]


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = ratios(1.5, 1.1).requires_grad_()
    ppo_clip(logprobs, ratios(1, 1), torch.ones(2, dtype=torch.float64), 0.2, 0.2).loss_T.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.1])


def test_k3_is_zero_at_equality_and_positive_elsewhere() -> None:
    kl = k3_kl(ratios(1.0, 0.5, 2.0), ratios(1.0, 1.0, 1.0))
    assert kl.tolist() == pytest.approx([0.0, 2 - math.log(2) - 1, 0.5 + math.log(2) - 1])


def test_k3_is_an_unbiased_estimate_of_the_kl_in_value() -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert (p * k3_kl(p.log(), q.log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item())


def test_tis_caps_the_ratio_from_above_only() -> None:
    weights = truncated_importance(ratios(0.1, 1.1, 3.0), ratios(1, 1, 1), cap=2.0)
    assert weights.tolist() == pytest.approx([0.1, 1.1, 2.0])


def test_an_impossible_log_ratio_stays_finite() -> None:
    far = torch.tensor([-1e4, 1e4])
    assert truncated_importance(far, torch.zeros(2), cap=1e12).isfinite().all()
    assert k3_kl(far, torch.zeros(2)).isfinite().all()


def test_tis_has_no_gradient() -> None:
    assert not truncated_importance(ratios(1.0).requires_grad_(), ratios(2.0), cap=2.0).requires_grad


def test_mismatch_reads_the_distribution() -> None:
    figures = mismatch(torch.arange(101) / 100)
    assert figures == pytest.approx(
        {
            "mismatch/mean_nats": 0.5,
            "mismatch/p95_nats": 0.95,
            "mismatch/max_nats": 1.0,
            "mismatch/out_of_band_share": 91 / 101,
        },
        abs=1e-6,
    )


def test_mismatch_by_age_is_the_mismatch_of_the_tokens_of_an_age() -> None:
    ratios = torch.tensor([0.1, 0.3, 0.0, 0.2, 0.05, 0.4, 0.6, 0.8])
    ages = torch.tensor([0, 0, 0, 0, 1, 1, 5, 17])
    assert mismatch_by_age(ratios, ages) == pytest.approx(
        {
            "mismatch/age_0/mean_nats": 0.15,
            "mismatch/age_0/p95_nats": 0.2,  # of 4 values the third
            "mismatch/age_0/max_nats": 0.3,
            "mismatch/age_0/out_of_band_share": 0.75,
            "mismatch/age_0/token_share": 0.5,
            "mismatch/age_1/mean_nats": 0.225,
            "mismatch/age_1/p95_nats": 0.05,
            "mismatch/age_1/max_nats": 0.4,
            "mismatch/age_1/out_of_band_share": 0.5,
            "mismatch/age_1/token_share": 0.25,
            "mismatch/age_5_or_more/mean_nats": 0.7,
            "mismatch/age_5_or_more/p95_nats": 0.6,
            "mismatch/age_5_or_more/max_nats": 0.8,
            "mismatch/age_5_or_more/out_of_band_share": 1.0,
            "mismatch/age_5_or_more/token_share": 0.25,
        },
        abs=1e-6,
    )


def test_of_no_tokens_there_is_no_mismatch_at_any_age() -> None:
    assert mismatch_by_age(torch.zeros(0), torch.zeros(0)) == {}


@pytest.mark.parametrize(
    ("name", "weights", "denominator"),
    [
        ("token_mean", [0, 1, 0, 1, 1, 1, 1], 5),
        ("sequence_mean", [0, 1, 0, 0.25, 0.25, 0.25, 0.25], 2),
        ("constant", [0, 1, 0, 1, 1, 1, 1], 2 * 16),
    ],
)
def test_aggregation(name: str, weights: list[float], denominator: float) -> None:
    mask = torch.tensor([0, 1, 0, 1, 1, 1, 1.0])
    assert AGGREGATIONS[name].weigh(mask, torch.tensor([2, 5])).tolist() == weights
    assert AGGREGATIONS[name].denominator(TOTALS, 16) == denominator


def test_sequence_mean_of_an_untrained_sample_is_zero() -> None:
    assert AGGREGATIONS["sequence_mean"].weigh(torch.zeros(3), torch.tensor([1, 2])).tolist() == [0, 0, 0]
