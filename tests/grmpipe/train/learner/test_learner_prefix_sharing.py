"""A real learner gives the same results for siblings that share their prompt and for siblings with a copy each. Two
ranks, and every loss with every aggregation, in float64: test_learner_two_ranks.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rank_metrics import of_all_ranks

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.lm.causal_lm import compute_packed_logprobs, load_causal_lm
from grmpipe.tiny.resolve import resolve_model
from grmpipe.train.batching.packer import MicroBatchRound, pack_rounds
from grmpipe.train.batching.samples import count, kl_of_rollouts, rollout_key, unpack
from grmpipe.train.learner.learner import DeviceBatch, Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import TrainingSample

WATCHED = AlgorithmConfig(loss="gspo", aggregation="sequence_mean", kl_coefficient=0.1, entropy_coefficient=0.01)


def learner_of(path: str, algorithm: AlgorithmConfig = WATCHED, **train: bool) -> Learner:
    config = TrainConfig(warmup_steps=0, **train)  # type: ignore[arg-type]
    return Learner(LearnerSpec(model_path=path, train=config, algorithm=algorithm, max_new_tokens=8, device="cpu"))


def both(samples: list[TrainingSample]) -> tuple[MicroBatchRound, MicroBatchRound]:
    """One micro-batch each: shared, and copied."""
    (shared,), (copied,) = (pack_rounds(samples, 10_000, 1, way) for way in (True, False))
    assert len(shared.micro_batches[0].token_ids_T) < len(copied.micro_batches[0].token_ids_T)
    return shared, copied


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_step_on_shared_prompts_is_one_on_copies(make_siblings, checkpointing: str) -> None:
    samples = make_siblings()
    gradients, metrics = [], []
    for round_ in both(samples):
        learner = learner_of(resolve_model("tiny://policy"), activation_checkpointing=checkpointing)
        learner.accumulate(round_.micro_batches[0])
        # type: ignore
        gradients.append([parameter.grad.full_tensor().clone() for parameter in learner._model.parameters()])
        metrics.append(of_all_ranks(learner.step(count(samples, 0))))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-6)
    for shared, copied in zip(*gradients, strict=True):
        torch.testing.assert_close(shared, copied, atol=1e-4, rtol=1e-3)


def by_sample(round_: MicroBatchRound, said_T: np.ndarray) -> dict[tuple[str, int], np.ndarray]:
    """The values at the trained tokens of each sample."""
    found = unpack(round_.samples[0], round_.micro_batches[0], said_T)
    return {rollout_key(sample): own_T[np.array(sample.loss_mask) > 0] for sample, own_T in found}


def assert_alike(shared: dict[tuple[str, int], np.ndarray], copied: dict[tuple[str, int], np.ndarray]) -> None:
    assert shared.keys() == copied.keys()
    for key, said_N in shared.items():
        np.testing.assert_allclose(said_N, copied[key], atol=1e-5)
        assert (said_N < -1).all()


def test_pi_old_and_the_reference_say_the_same_of_every_trained_token(qwen_path: str, make_siblings) -> None:
    learner, rounds = learner_of(qwen_path), both(make_siblings())
    assert_alike(*(by_sample(one, learner.old_pass(one.micro_batches[0]).logprobs_T) for one in rounds))
    assert_alike(*(by_sample(one, learner.reference_logprobs(one.micro_batches[0])) for one in rounds))


def test_a_distance_that_is_taken_off_the_rewards_finds_its_tokens(qwen_path: str, make_siblings) -> None:
    learner = learner_of(qwen_path)
    shared, copied = (
        kl_of_rollouts([round_], [[learner.reference_logprobs(round_.micro_batches[0])]], "k3")
        for round_ in both(make_siblings())
    )
    assert shared.keys() == copied.keys()
    for key, nats_N in shared.items():
        np.testing.assert_allclose(nats_N, copied[key], atol=1e-4)


def test_shared_tokens_are_replayed_where_the_first_sibling_sent_them(mixture_path: str, make_siblings) -> None:
    """Siblings that all used the same experts get the same as with copies."""
    draw, samples = np.random.default_rng(0), []
    by_group: dict[str, np.ndarray] = {}
    for sample in make_siblings():
        length = len(sample.token_ids)
        own_TLK = draw.permuted(np.tile(np.arange(4), (length, 2, 1)), axis=-1)[..., :2].astype(np.int16)
        before = sample.loss_mask.index(1)
        own_TLK[:before] = by_group.setdefault(sample.group_id, own_TLK[:before].copy())
        samples.append(replace(sample, experts_TLK=own_TLK))
    learner = learner_of(mixture_path, AlgorithmConfig(router_replay="rollout"))
    said = (by_sample(one, learner.old_pass(one.micro_batches[0]).logprobs_T) for one in both(samples))
    assert_alike(*said)


# -- trees -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["dense", "mixture"])
def test_the_gradient_of_a_tree_is_that_of_its_samples(
    family: str, gpt2_path: str, mixture_path: str, make_episodes
) -> None:
    """In float64: all of GPT-2; of the mixture all except its norms and router, which round to float32."""
    path, tolerance = {"dense": (gpt2_path, 1e-11), "mixture": (mixture_path, 1e-4)}[family]
    model = load_causal_lm(path, "float64")
    if family == "mixture":
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    gradients = []
    for round_ in both(make_episodes(2)):
        model.zero_grad()
        batch = DeviceBatch.of(round_.micro_batches[0], torch.device("cpu"))
        logprobs_T = compute_packed_logprobs(
            model,
            batch.token_ids_T,
            batch.position_ids_T,
            batch.sample_lengths_S,
            batch.prefixes,
            wanted_T=batch.wanted_T,
        ).logprobs_T
        (batch.advantages_E.double() * logprobs_T[batch.places_E]).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for shared, copied in zip(*gradients, strict=True):
        torch.testing.assert_close(shared, copied, atol=tolerance, rtol=0)
    assert max(float(gradient.abs().max()) for gradient in gradients[0]) > 1


def test_pi_old_and_the_reference_say_the_same_of_a_tree(gpt2_path: str, make_episodes) -> None:
    learner, samples = learner_of(gpt2_path), make_episodes(2, rewrites=False)
    for passed in (
        lambda batch: learner.old_pass(batch).logprobs_T,
        lambda batch: learner.reference_logprobs(batch),
    ):
        assert_alike(*(by_sample(one, passed(one.micro_batches[0])) for one in both(samples)))


def test_a_distance_that_is_taken_off_the_rewards_of_a_tree_finds_its_tokens(qwen_path: str, make_episodes) -> None:
    learner = learner_of(qwen_path)
    shared, copied = (
        kl_of_rollouts([round_], [[learner.reference_logprobs(round_.micro_batches[0])]], "k3")
        for round_ in both(make_episodes(2))
    )
    assert shared.keys() == copied.keys()
    for key, nats_N in shared.items():
        np.testing.assert_allclose(nats_N, copied[key], atol=1e-4)


def test_a_tree_replays_the_experts_of_each_sampled_token(mixture_path: str, make_episodes) -> None:
    """Two siblings were sent elsewhere: they have their tokens computed for themselves."""
    draw, samples = np.random.default_rng(0), []
    ways = draw.permuted(np.tile(np.arange(4), (64, 2, 1)), axis=-1)[..., :2].astype(np.int16)
    for sample in make_episodes(2, rewrites=False):
        experts_TLK = ways[list(sample.token_ids)]
        if sample.sibling == 3:
            experts_TLK = np.where(np.array(sample.loss_mask)[:, None, None] > 0, 3 - experts_TLK, experts_TLK)
        samples.append(replace(sample, experts_TLK=experts_TLK.astype(np.int16)))
    learner = learner_of(mixture_path, AlgorithmConfig(router_replay="rollout"))
    assert_alike(*(by_sample(one, learner.old_pass(one.micro_batches[0]).logprobs_T) for one in both(samples)))
