"""Corrections, rejections and mismatch metrics by the numbers of their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from grmpipe.algorithm.corrections import (
    OffPolicyDrift,
    geometric,
    icepop,
    interpolate_proximal,
    mask_sequence,
    mask_tokens,
    measure_drift,
    mismatch,
    mismatch_by_age,
    off_policy,
    truncate_importance,
    truncate_sequence,
    veto,
)
from grmpipe.algorithm.objective import Objective
from grmpipe.algorithm.parts import CORRECTIONS
from grmpipe.algorithm.settings import Band, Cap, OffPolicy, Truncation, Veto
from grmpipe.config.train import AlgorithmConfig


def drift(weights: list[float], lengths: list[int] | None = None, **given: list[float]) -> OffPolicyDrift:
    """Samples whose tokens have these w, with pi_theta = pi_prox unless `behind` gives mu / pi_theta."""
    log_weights = torch.tensor(weights, dtype=torch.float64).log()
    mask = torch.tensor(given.get("mask", [1.0] * len(weights)), dtype=torch.float64)
    behind = torch.tensor(given["behind"], dtype=torch.float64).log() if "behind" in given else -log_weights
    return OffPolicyDrift(
        log_weights_T=log_weights * mask,
        log_behind_T=behind * mask,
        advantages_T=torch.tensor(given.get("advantages", [1.0] * len(weights)), dtype=torch.float64),
        loss_mask_T=mask,
        sequence_lengths_S=torch.tensor(lengths or [len(weights)]),
    )


def one_for_all(drift: OffPolicyDrift, algorithm: AlgorithmConfig) -> Tensor:
    return torch.tensor(True)


def half(drift: OffPolicyDrift, algorithm: AlgorithmConfig) -> float:
    return 0.5


@pytest.mark.parametrize(
    ("key", "apply", "shape"),
    [("correction", Objective.correct, r"\(2,\)"), ("rejections", Objective.keep, r"\(1,\)")],
)
def test_a_correction_that_would_be_broadcast_is_refused_by_key_function_and_line(
    key: str, apply: Callable, shape: str
) -> None:
    for function, what in ((one_for_all, r"a tensor of shape \(\)"), (half, r"0\.5")):
        name = f"{__name__}.{function.__name__}"
        algorithm = AlgorithmConfig(**{key: name if key == "correction" else [name]})  # type: ignore[arg-type]
        said = (
            rf"^algorithm\.{key}: .*{function.__name__} \(.*:\d+\) returned {what}; return a tensor of shape {shape}$"
        )
        with pytest.raises(ValueError, match=said):
            apply(Objective.of(algorithm), drift([1.0, 1.0]))


def test_tis_caps_the_ratio_from_above_only() -> None:
    assert truncate_importance(
        drift([0.1, 1.1, 3.0]), AlgorithmConfig(tis=Truncation(cap=2.0))
    ).tolist() == pytest.approx([0.1, 1.1, 2.0])


def test_sequence_weights_are_products_over_a_sample() -> None:
    """Products 1.32 and 6.0; the second is capped, or masked."""
    drifted = drift([1.1, 1.2, 2.0, 3.0], [2, 2])
    assert truncate_sequence(drifted, AlgorithmConfig(sequence=Cap(cap=3.0))).tolist() == pytest.approx(
        [1.32, 1.32, 3.0, 3.0]
    )
    assert mask_sequence(drifted, AlgorithmConfig(sequence=Cap(cap=3.0))).tolist() == pytest.approx(
        [1.32, 1.32, 0.0, 0.0]
    )


def test_tokens_that_arent_trained_are_in_no_product_and_no_mean() -> None:
    drifted = drift([50.0, 1.1, 1.2], mask=[0.0, 1.0, 1.0])
    assert truncate_sequence(drifted, AlgorithmConfig(sequence=Cap(cap=100.0))).tolist() == pytest.approx([1.32] * 3)
    assert geometric(drifted, AlgorithmConfig(geometric=Band(low=1.14, high=1.16))).tolist() == [
        True
    ]  # sqrt(1.32) = 1.149
    assert veto(drift([1e-9, 1.0], mask=[0.0, 1.0]), AlgorithmConfig(veto=Veto(below=1e-4))).tolist() == [True]


@pytest.mark.parametrize(("length", "product"), [(10, 2.59), (100, 13_780)])
def test_products_grow_with_the_length_and_the_geometric_mean_does_not(length: int, product: float) -> None:
    drifted = drift([1.1] * length)
    assert drifted.product_S().exp().item() == pytest.approx(product, rel=2e-3)
    assert geometric(drifted, AlgorithmConfig(geometric=Band(low=1.09, high=1.11))).tolist() == [True]
    assert geometric(drifted, AlgorithmConfig(geometric=Band(low=0.99, high=1.01))).tolist() == [False]


def test_icepop_zeroes_what_is_outside_its_band_and_decoupled_what_is_above() -> None:
    drifted = drift([0.4, 0.5, 1.3, 5.0, 5.1])
    within = AlgorithmConfig(icepop=Band(low=0.5, high=5.0), decoupled=Cap(cap=5.0))
    assert icepop(drifted, within).tolist() == pytest.approx([0.0, 0.5, 1.3, 5.0, 0.0])
    assert mask_tokens(drifted, within).tolist() == pytest.approx([0.4, 0.5, 1.3, 5.0, 0.0])


def test_veto_needs_one_impossible_token() -> None:
    assert veto(drift([1.0, 5e-5, 1.0, 1.0, 2e-4], [3, 2]), AlgorithmConfig(veto=Veto(below=1e-4))).tolist() == [
        False,
        True,
    ]


def test_off_policy_drops_bad_samples_that_became_unlikely() -> None:
    """mean(log mu - log pi_theta) of 0.2 and 0.0 nats: only a bad sample above 0.1 is dropped."""
    behind = [math.exp(0.3), math.exp(0.1), math.exp(0.2), math.exp(-0.2)]
    bad = drift([1.0] * 4, [2, 2], behind=behind, advantages=[-1.0] * 4)
    good = drift([1.0] * 4, [2, 2], behind=behind, advantages=[1.0] * 4)
    assert off_policy(bad, AlgorithmConfig(off_policy=OffPolicy(delta=0.1))).tolist() == [False, True]
    assert off_policy(bad, AlgorithmConfig(off_policy=OffPolicy(delta=0.3))).tolist() == [True, True]
    assert off_policy(good, AlgorithmConfig(off_policy=OffPolicy(delta=0.1))).tolist() == [True, True]


def test_a_sample_is_kept_only_if_all_rejections_keep_it() -> None:
    drifted = drift([1.0, 1.0, 1.5, 1.5, 1e-5, 1e5], [2, 2, 2])
    by_names = {
        (): [1, 1, 1],
        ("veto",): [1, 1, 0],
        ("geometric",): [1, 0, 1],
        ("geometric", "veto"): [1, 0, 0],
    }
    for names, expected in by_names.items():
        found = Objective.of(AlgorithmConfig(rejections=list(names))).keep(drifted)
        assert found.tolist() == [value for value in expected for _ in range(2)]


def test_an_impossible_log_ratio_stays_finite() -> None:
    far = torch.tensor([-1e4, 1e4])
    one, nothing = torch.ones(2), torch.zeros(2)
    drifted = measure_drift(far, far, nothing, one, one, torch.tensor([1, 1]))
    for name in CORRECTIONS:
        algorithm = AlgorithmConfig(
            correction=name, tis=Truncation(cap=1e12), sequence=Cap(cap=1e12), decoupled=Cap(cap=1e12)
        )
        assert Objective.of(algorithm).correct(drifted).isfinite().all()


def test_no_gradient_goes_through_a_weight() -> None:
    logprobs = torch.zeros(2, requires_grad=True)
    drifted = measure_drift(logprobs, logprobs, torch.ones(2), torch.ones(2), torch.ones(2), torch.tensor([2]))
    for name in CORRECTIONS:
        assert not Objective.of(AlgorithmConfig(correction=name)).correct(drifted).requires_grad


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_the_weight_is_numpys_sample_by_sample(name: str) -> None:
    draw, lengths = np.random.default_rng(2), [3, 1, 5]
    proximal, sampler = draw.normal(-1, 0.8, 9), draw.normal(-1, 0.8, 9)
    mask = np.array([0, 1, 1, 1, 0, 1, 1, 0, 1.0])
    drifted = measure_drift(*map(torch.from_numpy, (proximal, proximal, sampler, np.ones(9), mask)), tensor(lengths))
    expected = []
    for log_w, trained in zip(*(np.split(x, [3, 4]) for x in (proximal - sampler, mask)), strict=True):
        w, product = np.exp(log_w), np.exp(log_w[trained > 0].sum())
        forms = {
            "none": np.ones(len(w)),
            "tis": np.minimum(w, 2),
            "sequence_tis": np.full(len(w), min(product, 3)),
            "sequence_mis": np.full(len(w), product if product <= 3 else 0.0),
            "icepop": np.where((w >= 0.5) & (w <= 5), w, 0),
            "decoupled": np.where(w <= 5, w, 0),
        }
        expected.append(forms[name])
    ours = Objective.of(AlgorithmConfig(correction=name)).correct(drifted).numpy()
    np.testing.assert_allclose(ours * mask, np.concatenate(expected) * mask, atol=1e-12)


def tensor(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths)


def test_the_interpolated_policy_is_one_version_behind_the_current() -> None:
    """Sampler -2, current -1: at age 5 four fifths of the way, at ages 0 and 1 the sampler itself."""
    ages = torch.tensor([0, 1, 2, 5])
    current, sampler = torch.full((4,), -1.0, dtype=torch.float64), torch.full((4,), -2.0, dtype=torch.float64)
    assert interpolate_proximal(current, sampler, ages).tolist() == pytest.approx([-2.0, -2.0, -1.5, -1.2])
    assert not interpolate_proximal(current.requires_grad_(), sampler, ages).requires_grad


def test_interpolated_weight_and_ratio_make_up_the_whole_ratio() -> None:
    """w u = pi_theta / mu at any age: nothing is weighted twice or left out."""
    draw = torch.Generator().manual_seed(0)
    current = torch.randn(6, generator=draw, dtype=torch.float64)
    sampler = torch.randn(6, generator=draw, dtype=torch.float64)
    proximal = interpolate_proximal(current, sampler, torch.arange(6))
    torch.testing.assert_close((proximal - sampler) + (current - proximal), current - sampler)
    assert ((proximal - sampler) / (current - sampler)).tolist() == pytest.approx([0, 0, 1 / 2, 2 / 3, 3 / 4, 4 / 5])


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
            "mismatch/age_0/p95_nats": 0.2,  # the third of 4 values
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


def test_mismatch_of_no_tokens_is_missing_at_any_age() -> None:
    assert mismatch_by_age(torch.zeros(0), torch.zeros(0)) == {}


def test_tis_has_a_floor_below_which_no_weight_falls() -> None:
    algorithm = AlgorithmConfig(tis=Truncation(cap=2.0, floor=0.5))
    assert truncate_importance(drift([0.1, 1.1, 3.0]), algorithm).tolist() == pytest.approx([0.5, 1.1, 2.0])
