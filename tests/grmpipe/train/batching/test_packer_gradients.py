"""Gradients of a batch in pieces, whose siblings share their prompts, equal those of the whole batch, sample by sample,
for every loss, aggregation and correction.

Pure torch: a table of logits takes the place of a model. Two ranks are in test_learner_two_ranks.py.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from grmpipe.algorithm.corrections import TokenLogprobs
from grmpipe.algorithm.objective import Objective
from grmpipe.algorithm.parts import AGGREGATIONS, CORRECTIONS, LOSSES, PROXIMALS, REJECTIONS
from grmpipe.algorithm.settings import Band, OffPolicy, Veto
from grmpipe.config.train import AlgorithmConfig
from grmpipe.models.lm.packing import Packing, Prefixes
from grmpipe.train.batching.packer import Packer
from grmpipe.train.batching.samples import count
from grmpipe.types import MicroBatch, TrainingSample

VOCABULARY, MAX_NEW_TOKENS = 64, 8
OFF_POLICY = {
    "clip_low": 0.3, "clip_high": 0.3, "geometric": Band(low=0.5, high=1.5), "off_policy": OffPolicy(delta=0.01)
}  # fmt: skip


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
    *(algorithm_of(kl_coefficient=0.3, kl_estimator=name, entropy_coefficient=0.1) for name in ("k2", "k3")),
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
        loss = Objective.of(algorithm).sum_loss(
            logprobs,
            torch.from_numpy(batch.advantages_E).double(),
            torch.from_numpy(batch.loss_mask_E),
            torch.from_numpy(batch.rollout_lengths_R),
        )
        loss.total.backward()
    assert table.grad is not None
    denominator = Objective.of(algorithm).aggregation.denominator(count(samples, 0), MAX_NEW_TOKENS)
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


def test_rejected_tokens_have_no_gradient_and_stay_in_the_denominator(make_samples) -> None:
    """A veto that no sample passes leaves nothing; one that all pass changes nothing."""
    samples = make_samples(8)
    plain, _ = gradient(samples, 40, AlgorithmConfig())
    harmless, _ = gradient(samples, 40, AlgorithmConfig(rejections=["veto"], veto=Veto(below=1e-30)))
    nothing, _ = gradient(samples, 40, AlgorithmConfig(rejections=["veto"], veto=Veto(below=1e30)))
    np.testing.assert_array_equal(harmless, plain)
    assert not nothing.any()


# -- rollouts of several turns and samples -----------------------------------------------------------------------------


def joined(samples: list[TrainingSample]) -> list[TrainingSample]:
    """The samples of each rollout end to end as one, which is the same where a token depends only on the one before."""
    found: dict[tuple[str, int], TrainingSample] = {}
    for sample in samples:
        before = found.get((sample.group_id, sample.sibling))
        if before is None:
            found[sample.group_id, sample.sibling] = sample
            continue
        assert sample.loss_mask[0] == 0, "the seam is not trained"
        found[sample.group_id, sample.sibling] = replace(
            before,
            token_ids=before.token_ids + sample.token_ids,
            loss_mask=before.loss_mask + sample.loss_mask,
            sampler_logprobs=before.sampler_logprobs + sample.sampler_logprobs,
            advantages=before.advantages + sample.advantages,
            versions=(replace(before.versions[0], end=len(before.token_ids + sample.token_ids)),),
        )
    return list(found.values())


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_a_tree_has_the_gradient_of_rollouts_with_one_sample_each(make_episodes, algorithm: AlgorithmConfig) -> None:
    """Sampled tokens that siblings have in common are computed once and trained by each; rollouts count once."""
    samples = make_episodes()
    single = joined(samples)
    assert len(single) < len(samples) and count(single, 0) == count(samples, 0)
    expected, one = gradient(single, 10_000, algorithm, shared=False)
    for max_tokens, shared in ((1, True), (60, True), (10_000, True), (10_000, False)):
        found, many = gradient(samples, max_tokens, algorithm, shared)
        assert many > one == 1 or max_tokens == 10_000
        np.testing.assert_allclose(found, expected, atol=1e-12, rtol=0)
    assert np.abs(expected).max() > 1e-6


def test_a_loss_that_sums_over_a_rollout_would_be_another_one_by_samples(make_episodes) -> None:
    """So the equality above says something: a rollout in two micro-batches has two ratios, and two means."""
    samples = make_episodes()
    for algorithm in (algorithm_of(loss="gspo", aggregation="sequence_mean"), algorithm_of(correction="sequence_tis")):
        apart = [replace(sample, sibling=10 * sample.sibling + sample.segment) for sample in samples]
        assert np.abs(gradient(apart, 10_000, algorithm)[0] - gradient(samples, 10_000, algorithm)[0]).max() > 1e-6


def test_only_losses_that_sum_over_a_rollout_keep_it_whole() -> None:
    assert not any(
        AlgorithmConfig(loss=loss, aggregation=name, correction=correction).needs_whole_rollouts
        for loss in ("ppo_clip", "dual_clip", "cispo", "policy_gradient")
        for name in ("token_mean", "constant")
        for correction in ("none", "tis", "icepop", "decoupled")
    )
    assert all(
        algorithm_of(**{key: name}).needs_whole_rollouts
        for key, names in (
            ("loss", ("gspo", "gspo_token")),
            ("aggregation", ("sequence_mean",)),
            ("correction", ("sequence_tis", "sequence_mis")),
            ("rejections", [[name] for name in REJECTIONS]),
        )
        for name in names
    )
