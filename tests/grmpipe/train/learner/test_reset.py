"""Resets towards the initial weights: by the formula, when they are due, and the same after a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch.distributed.tensor import DTensor

from grmpipe.config.train import AlgorithmConfig, ResetConfig, TrainConfig
from grmpipe.train.batching.packer import pack
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.reset import reset_is_due
from grmpipe.types import Metrics, TrainingSample
from models.types import InlineBytes


def make_learner(path: str, **algorithm: float) -> Learner:
    train = TrainConfig(lr=1e-2, warmup_steps=0, num_steps=9)
    settings = AlgorithmConfig(**algorithm)  # type: ignore[arg-type]
    return Learner(LearnerSpec(model_path=path, train=train, algorithm=settings, max_new_tokens=8, device="cpu"))


def weights(learner: Learner) -> np.ndarray:
    bucket = learner.sender.bucket(0)
    assert bucket is not None and isinstance(bucket.payload, InlineBytes)
    return np.concatenate([data.view(np.float32) for data in bucket.payload.data])


def step(learner: Learner, samples: list[TrainingSample]) -> Metrics:
    learner.accumulate(pack(samples))
    return learner.step(count(samples, 0))


def largest(learner: Learner, name: str) -> float:
    """The largest value of the optimizer's state with this name."""
    kept = [state[name] for state in learner._optimizer.state.values()]
    return max(float((one.to_local() if isinstance(one, DTensor) else one).abs().max()) for one in kept)


def test_a_reset_goes_its_share_of_the_way_and_forgets_the_moments(qwen_path: str, make_samples) -> None:
    """theta <- 0.75 theta + 0.25 theta_0, where theta is that of a learner without resets."""
    samples = make_samples()
    free, pulled = make_learner(qwen_path), make_learner(qwen_path, reset=ResetConfig(every=2, share=0.25))
    initial = weights(free)
    told = [(step(free, samples), step(pulled, samples)) for _ in range(2)]
    assert [metrics["train/reset"] for _, metrics in told] == [0.0, 1.0]
    assert "train/reset" not in told[0][0]
    np.testing.assert_allclose(weights(pulled), 0.75 * weights(free) + 0.25 * initial, atol=1e-7)
    assert np.abs(weights(free) - initial).max() > 0.01
    assert largest(pulled, "exp_avg") == largest(pulled, "exp_avg_sq") == largest(pulled, "step") == 0
    assert largest(free, "exp_avg") > 0 and largest(free, "step") == 2
    step(pulled, samples)  # it continues without moments
    assert largest(pulled, "step") == 1


def test_a_reset_all_the_way_is_the_beginning(qwen_path: str, make_samples) -> None:
    learner = make_learner(qwen_path, reset=ResetConfig(every=1, share=1.0))
    initial = weights(learner)
    step(learner, make_samples())
    np.testing.assert_array_equal(weights(learner), initial)


def test_a_resumed_learner_goes_back_to_the_same_beginning(qwen_path: str, make_samples, tmp_path: Path) -> None:
    """Saved right after a reset; saving changes nothing either."""
    samples = make_samples()
    unsaved, saved, resumed = (make_learner(qwen_path, reset=ResetConfig(every=2, share=0.5)) for _ in range(3))
    for one in (unsaved, saved):
        assert [step(one, samples)["train/reset"] for _ in range(2)] == [0.0, 1.0]
    saved.save(str(tmp_path))
    resumed.load(str(tmp_path))
    for one in (unsaved, saved, resumed):
        assert [step(one, samples)["train/reset"] for _ in range(2)] == [0.0, 1.0]
        np.testing.assert_array_equal(weights(one), weights(unsaved))


def test_no_reset_comes_between_the_updates_of_a_batch(qwen_path: str, make_samples) -> None:
    learner = make_learner(qwen_path, reset=ResetConfig(every=1), updates_per_batch=3)
    told = [step(learner, make_samples())["train/reset"] for _ in range(6)]
    assert told == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]


def test_a_reset_is_due_at_the_end_of_batches_but_of_the_last() -> None:
    assert [v for v in range(1, 13) if reset_is_due(v, every=3, last_version=12)] == [3, 6, 9]
    assert not any(reset_is_due(v, every=0, last_version=9) for v in range(1, 9))


def test_resets_go_on_to_the_last_batches_after_a_warm_up_of_the_critic(qwen_path: str, make_samples) -> None:
    """Ten batches, the first four only for the critic: the policy makes versions 5 to 10."""
    train, algorithm = TrainConfig(lr=1e-2, warmup_steps=0, num_steps=6), AlgorithmConfig(reset=ResetConfig(every=2))
    learner = Learner(
        LearnerSpec(
            model_path=qwen_path, train=train, algorithm=algorithm, max_new_tokens=8, device="cpu", first_version=4
        )
    )
    told = {}
    for _ in range(6):
        reset = step(learner, make_samples(2))["train/reset"]
        told[learner.policy_version] = reset
    assert told == {5: 0.0, 6: 1.0, 7: 0.0, 8: 1.0, 9: 0.0, 10: 0.0}
