"""Experts of the sampler, or of the pass for pi_old, replayed in the learner: log-probs agree, gates still train."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from grmpipe.config.io.yaml_io import build_config
from grmpipe.config.run_config import ConfigError
from grmpipe.config.train import AlgorithmConfig, TrainConfig, check_router_replay
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import ANY_EXPERT, Completion, RequestContext, SamplingParams, VersionSpan
from grmpipe.tiny.resolve import SHIPPED
from grmpipe.tiny.upcycle import upcycle
from grmpipe.train.batching.packer import pack
from grmpipe.train.batching.samples import count, split_rollout
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import MicroBatch, Rollout, TrainingSample, Turn

REPLAYED = AlgorithmConfig(router_replay="rollout")


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny policy as a mixture."""
    path = tmp_path_factory.mktemp("mixture")
    upcycle(SHIPPED / "policy", path)
    return str(path)


@pytest.fixture(scope="module")
def sampled(policy_path: str) -> MicroBatch:
    """The answers of a sampler in bfloat16, with their experts."""
    engine = EmbeddedEngine(
        EngineSpec(path=policy_path, role="policy", dtype="bfloat16", return_routed_experts=True), EmbeddedConfig()
    )
    prompts = [tuple(range(20 + index % 4, 60)) for index in range(24)]

    async def one(index: int) -> Completion:
        context = RequestContext(request_id=str(index), group_id="g", role="policy")
        return await engine.generate(prompts[index], SamplingParams(max_new_tokens=40, seed=index), context)

    async def every() -> Sequence[Completion]:
        return await asyncio.gather(*map(one, range(len(prompts))))

    completions = asyncio.run(every())
    engine.close()
    samples = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        rollout = rollout_of(Turn(new_ids=prompt, completion=completion), sibling=index)
        samples += split_rollout(rollout, np.ones(rollout.num_sampled_tokens))
    return pack(samples)


def make_learner(path: str, algorithm: AlgorithmConfig = REPLAYED, **train: bool | float) -> Learner:
    spec = LearnerSpec(
        model_path=path,
        train=TrainConfig(warmup_steps=0, **train),  # type: ignore[arg-type]
        algorithm=algorithm,
        max_new_tokens=40,
        device="cpu",
    )
    return Learner(spec)


def rollout_of(*turns: Turn, sibling: int = 0) -> Rollout:
    return Rollout(group_id="g", sibling=sibling, turns=turns, status="finished")


def turn(prompt: Sequence[int], answer: Sequence[int], experts: Sequence[int] | None) -> Turn:
    """One layer, one expert per token."""
    completion = Completion(
        token_ids=tuple(answer),
        logprobs=(-1.0,) * len(answer),
        text="",
        finish_reason="stop",
        versions=(VersionSpan(model="policy", version=0, start=0, end=len(answer)),),
        experts_TLK=None if experts is None else np.array(experts, dtype=np.uint8)[:, None, None],
    )
    return Turn(new_ids=tuple(prompt), completion=completion)


def mismatch_of(learner: Learner, batch: MicroBatch) -> np.ndarray:
    """|log pi - log mu| of the trained tokens."""
    return np.abs(learner.old_pass(batch).logprobs_T - batch.sampler_logprobs_E)[batch.loss_mask_E > 0]


# -- what the learner gets -----------------------------------------------------------------------------------------


def test_a_token_keeps_the_experts_of_the_turn_that_fed_it_first() -> None:
    """The last token of a turn is fed with the next prompt, whose experts for older tokens come too late."""
    first = turn((1, 2), (3, 4), experts=(11, 12, 13))
    second = turn((5,), (6, 7), experts=(91, 92, 93, 14, 15, 16))
    (sample,) = split_rollout(rollout_of(first, second), np.zeros(4))
    assert sample.experts_TLK is not None
    assert sample.experts_TLK[:, 0, 0].tolist() == [11, 12, 13, 14, 15, 16, ANY_EXPERT]


def test_turns_without_experts_are_filled_from_later_ones_where_they_can() -> None:
    first, second = turn((1,), (2,), experts=None), turn((3,), (4,), experts=(11, 12, 13))
    (sample,) = split_rollout(rollout_of(first, second), np.zeros(2))
    assert sample.experts_TLK is not None
    assert sample.experts_TLK[:, 0, 0].tolist() == [11, 12, 13, ANY_EXPERT]
    (sample,) = split_rollout(rollout_of(first), np.zeros(1))
    assert sample.experts_TLK is None


def test_samples_without_experts_leave_the_choice_to_the_router() -> None:
    """For example rollouts kept from an earlier process."""
    (with_experts,) = split_rollout(rollout_of(turn((1, 2), (3,), experts=(11, 12))), np.zeros(1))
    (without,) = split_rollout(rollout_of(turn((4,), (5,), experts=None)), np.zeros(1))
    mixed = pack([without, with_experts])
    assert mixed.experts_TLK is not None and mixed.experts_TLK.dtype == np.int16
    assert mixed.experts_TLK[:, 0, 0].tolist() == [ANY_EXPERT] * 2 + [11, 12, ANY_EXPERT]
    assert pack([without]).experts_TLK is None


# -- what it does with them ----------------------------------------------------------------------------------------


def test_replay_takes_away_what_routing_adds_to_the_mismatch(policy_path: str, sampled: MicroBatch) -> None:
    """A sampler in bfloat16, a learner in float32. What is left is rounding."""
    own = mismatch_of(make_learner(policy_path, AlgorithmConfig()), sampled)
    replayed = mismatch_of(make_learner(policy_path), sampled)
    assert own.max() > 5 * replayed.max() and own.mean() > 1.5 * replayed.mean()
    assert replayed.max() < 0.25 and replayed.mean() < 0.02


def test_share_of_rerouted_tokens_is_a_metric(policy_path: str, sampled: MicroBatch) -> None:
    learner = make_learner(policy_path)
    told = learner.accumulate(sampled)
    share = told["train/rerouted_share_sum"] / told["train/tokens_sum"]
    assert 0.005 < share < 0.2
    assert make_learner(policy_path).accumulate(replace(sampled, experts_TLK=None))["train/rerouted_share_sum"] == 0
    plain = make_learner(policy_path, AlgorithmConfig())
    assert "train/rerouted_share_sum" not in plain.accumulate(sampled)


def test_activation_checkpointing_replays_once_more(mixture_path: str, make_samples) -> None:
    """Its second forward pass, during backward, uses the same experts."""
    batch = with_random_experts(make_samples())
    found = []
    for checkpointing in ("none", "selective", "full"):
        learner = make_learner(mixture_path, activation_checkpointing=checkpointing)
        learner.accumulate(batch)
        found.append([parameter.grad.full_tensor() for parameter in learner._model.parameters()])  # type: ignore
    for plain, *others in zip(*found, strict=True):
        for checkpointed in others:
            torch.testing.assert_close(plain, checkpointed, atol=1e-5, rtol=1e-4)


def with_random_experts(samples: list[TrainingSample]) -> MicroBatch:
    """Two of four for each of two layers: no router would choose them."""
    batch, draw = pack(samples), np.random.default_rng(0)
    experts_TLK = draw.permuted(np.tile(np.arange(4), (len(batch.token_ids_T), 2, 1)), axis=-1)[..., :2]
    return replace(batch, experts_TLK=experts_TLK.astype(np.int16))


def test_the_reference_goes_its_own_ways(mixture_path: str, make_samples) -> None:
    """It never sampled, so it has no recorded experts."""
    learner = make_learner(mixture_path, replace(REPLAYED, kl_coefficient=0.1))
    batch = with_random_experts(make_samples())
    plain = replace(batch, experts_TLK=None)
    np.testing.assert_array_equal(learner.reference_logprobs(batch), learner.reference_logprobs(plain))
    assert np.abs(learner.old_pass(batch).logprobs_T - learner.old_pass(plain).logprobs_T).max() > 0.01


def test_later_updates_go_where_the_pass_for_pi_old_went(mixture_path: str, make_samples) -> None:
    """R2: weights change, the choice of experts doesn't."""
    samples = make_samples()
    batch, totals = pack(samples), count(samples, 0)
    algorithm = AlgorithmConfig(router_replay="old_logprobs", updates_per_batch=2)
    learner = make_learner(mixture_path, algorithm, lr=0.03)
    old = learner.old_pass(batch)
    assert old.experts_TLK is not None and old.experts_TLK.shape == (len(batch.token_ids_T), 2, 2)
    learner.accumulate(batch, old)
    assert learner.step(totals)["train/rerouted_share"] == 0, "the weights are still those of the pass"
    learner.accumulate(batch, old)
    assert learner.step(totals)["train/rerouted_share"] > 0.05
    assert make_learner(mixture_path, AlgorithmConfig()).old_pass(batch).experts_TLK is None


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "groups_per_batch"),
    [
        (AlgorithmConfig(router_replay="old_logprobs"), 4),
        (AlgorithmConfig(router_replay="old_logprobs", updates_per_batch=2), 1),
        (AlgorithmConfig(router_replay="old_logprobs", updates_per_batch=2, proximal="sampler", correction="none"), 4),
    ],
)
def test_old_logprobs_needs_a_pass_for_them(algorithm: AlgorithmConfig, groups_per_batch: int) -> None:
    with pytest.raises(ValueError, match=r"algorithm\.router_replay: .* type algorithm\.updates_per_batch=2"):
        check_router_replay(algorithm, groups_per_batch)
    with pytest.raises(ConfigError, match=r"^algorithm\.router_replay: old_logprobs replays"):
        build_config({"algorithm": {"router_replay": "old_logprobs"}})
    check_router_replay(AlgorithmConfig(router_replay="old_logprobs", updates_per_batch=2), 4)
    check_router_replay(REPLAYED, 1)


def test_unknown_ways_to_replay_are_refused() -> None:
    with pytest.raises(ValueError, match="router_replay: unknown value 'r3'; known: none, rollout, old_logprobs"):
        AlgorithmConfig(router_replay="r3")


def test_a_learner_of_a_dense_model_has_nothing_to_replay(qwen_path: str) -> None:
    with pytest.raises(ValueError, match="router_replay: .*Qwen3ForCausalLM has no router"):
        make_learner(qwen_path)
