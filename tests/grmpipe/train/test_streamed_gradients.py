"""Gradients of a batch in pieces, whose siblings share their prompts, equal those of the whole batch, sample by sample,
for every loss, aggregation and correction.

Pure torch: a table of logits takes the place of a model. Two ranks are in test_two_ranks.py.
"""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from grmpipe.algorithm.losses import Aggregation
from grmpipe.algorithm.objective import TokenLogprobs, summed_loss
from grmpipe.config.algorithm_tables import (
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSSES,
    PROXIMALS,
    REJECTIONS,
)
from grmpipe.config.train import AlgorithmConfig
from grmpipe.train.batching.packer import Packer
from grmpipe.train.batching.samples import count
from grmpipe.types import MicroBatch, TrainingSample
from models.lm.packing import Packing, Prefixes

VOCABULARY, MAX_NEW_TOKENS = 64, 8
OFF_POLICY = {"clip_low": 0.3, "clip_high": 0.3, "geometric_low": 0.5, "geometric_high": 1.5, "off_policy_delta": 0.01}


def algorithm_of(**keys: object) -> AlgorithmConfig:
    """Bands that include some of the samples, and exclude some."""
    return AlgorithmConfig(**{**OFF_POLICY, **keys})  # type: ignore[arg-type]


def algorithms(losses: tuple[str, ...]) -> list[AlgorithmConfig]:
    """All valid combinations of proximal policies and corrections."""
    found = []
    for loss, proximal, correction in itertools.product(losses, PROXIMALS, CORRECTIONS):
        with contextlib.suppress(ValueError):
            found.append(algorithm_of(loss=loss, proximal=proximal, correction=correction))
    return found


ALGORITHMS = [
    *(algorithm_of(loss=loss, aggregation=name) for loss, name in itertools.product(LOSSES, AGGREGATIONS)),
    *algorithms(("ppo_clip", "gspo", "cispo")),
    *(algorithm_of(rejections=[name], aggregation="sequence_mean") for name in REJECTIONS),
    *(algorithm_of(kl_coefficient=0.3, kl_estimator=name, entropy_coefficient=0.1) for name in KL_ESTIMATORS),
]


def logprobs_of(table_VV: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of each token given the one before it in its sample; 0 for the first."""
    ids = torch.from_numpy(batch.token_ids_T)
    prefixes = Prefixes(parents_S=torch.from_numpy(batch.parents_S), lengths_S=torch.from_numpy(batch.prefix_lengths_S))
    before = Packing(torch.from_numpy(batch.sample_lengths_S), prefixes).before_T
    log_softmax = table_VV[ids[before]].log_softmax(-1)
    inner = torch.from_numpy(batch.position_ids_T) > 0
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return torch.where(inner, log_softmax.gather(-1, ids[:, None])[:, 0], 0.0), torch.where(inner, entropy, 0.0)


def gradient(
    samples: list[TrainingSample], max_tokens: int, algorithm: AlgorithmConfig, shared: bool = True
) -> tuple[np.ndarray, int]:
    """d loss / d table of the batch, and the number of micro-batches. pi_old and the reference are nearby tables."""
    draw = torch.Generator().manual_seed(0)
    table, old, reference = (
        torch.randn(VOCABULARY, VOCABULARY, generator=draw, dtype=torch.float64) * scale for scale in (1.0, 0.3, 0.3)
    )
    table.requires_grad_()
    packer = Packer(max_tokens, 1, shared, algorithm.needs_whole_rollouts)
    rounds = packer.add(samples) + packer.flush()
    for round_ in rounds:
        (batch,) = round_.micro_batches
        places_E = torch.from_numpy(batch.places_E)
        current_T, entropy_T = logprobs_of(table, batch)
        logprobs = TokenLogprobs(
            current_T=current_T[places_E],
            entropy_T=entropy_T[places_E],
            old_T=logprobs_of(table.detach() + old, batch)[0][places_E],
            sampler_T=torch.from_numpy(batch.sampler_logprobs_E).double(),
            reference_T=logprobs_of(table.detach() + reference, batch)[0][places_E]
            if algorithm.kl_coefficient
            else None,
            ages_T=3 - torch.from_numpy(batch.versions_E),
        )
        loss = summed_loss(
            logprobs,
            torch.from_numpy(batch.advantages_E).double(),
            torch.from_numpy(batch.loss_mask_E),
            torch.from_numpy(batch.rollout_lengths_R),
            algorithm,
        )
        loss.total.backward()
    assert table.grad is not None
    denominator = AGGREGATIONS.found(algorithm.aggregation, Aggregation).denominator(count(samples, 0), MAX_NEW_TOKENS)
    return (table.grad / denominator).numpy(), len(rounds)


def name_of(algorithm: AlgorithmConfig) -> str:
    parts = [algorithm.loss, algorithm.aggregation, algorithm.proximal, algorithm.correction, *algorithm.rejections]
    return "-".join([*parts, algorithm.kl_estimator] if algorithm.kl_coefficient else parts)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_pieces_have_the_gradient_of_the_whole(make_siblings, algorithm: AlgorithmConfig) -> None:
    samples = make_siblings(17)
    whole, one = gradient(samples, 10_000, algorithm, shared=False)
    for max_tokens in (1, 50, 10_000):  # one sample each, a few groups, all of them
        pieces, many = gradient(samples, max_tokens, algorithm)
        assert many > one == 1 or max_tokens == 10_000
        np.testing.assert_allclose(pieces, whole, atol=1e-12, rtol=0)
    assert np.abs(whole).max() > 1e-6


def test_the_order_in_which_groups_end_changes_no_gradient(make_siblings) -> None:
    samples = make_siblings(16)
    whole, _ = gradient(samples, 40, AlgorithmConfig(loss="gspo", aggregation="sequence_mean"))
    shuffled = [samples[i] for i in np.random.default_rng(0).permutation(16)]
    again, _ = gradient(shuffled, 40, AlgorithmConfig(loss="gspo", aggregation="sequence_mean"))
    np.testing.assert_allclose(again, whole, atol=1e-12, rtol=0)


def test_what_is_rejected_has_no_gradient_and_keeps_its_place_in_the_denominator(make_samples) -> None:
    """A veto that no sample passes leaves nothing; one that all pass changes nothing."""
    samples = make_samples(8)
    plain, _ = gradient(samples, 40, AlgorithmConfig())
    harmless, _ = gradient(samples, 40, AlgorithmConfig(rejections=["veto"], veto_below=1e-30))
    nothing, _ = gradient(samples, 40, AlgorithmConfig(rejections=["veto"], veto_below=1e30))
    np.testing.assert_array_equal(harmless, plain)
    assert not nothing.any()
