"""A learner whose state waits on the host between its phases steps like one that never offloads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.types import InlineBytes, OnDevice
from grmpipe.train.batching.packer import pack
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.offload import OffloadingLearner


def make(path: str) -> OffloadingLearner:
    train, algorithm = TrainConfig(lr=1e-2, warmup_steps=0), AlgorithmConfig(kl_coefficient=0.1)
    return OffloadingLearner(
        LearnerSpec(model_path=path, train=train, algorithm=algorithm, max_new_tokens=8, device="cpu")
    )


def weights(learner: OffloadingLearner) -> bytes:
    bucket = learner.sender.bucket(0)
    assert bucket is not None
    assert isinstance(bucket.payload, InlineBytes)
    return b"".join(data.tobytes() for data in bucket.payload.data)


def test_offloaded_learner_trains_on_unchanged(qwen_path: str, make_samples: Callable) -> None:
    lending, steady = make(qwen_path), make(qwen_path)
    pushed = []
    for seed in range(3):
        samples = make_samples(seed=seed)
        lending.move_state("everything")
        for learner in (lending, steady):
            micro_batch = pack(samples)
            learner.accumulate(micro_batch)
            learner.step(count(samples, 0))
        lending.move_state("weights")
        pushed.append((weights(lending), weights(steady)))
        assert lending.score((1, 2, 3)) == steady.score((1, 2, 3))
        lending.move_state("nothing")
    assert all(sent == kept for sent, kept in pushed)


@pytest.mark.parametrize("on_device", ["weights", "nothing"])
def test_offloaded_learner_can_not_work(qwen_path: str, make_samples: Callable, on_device: OnDevice) -> None:
    learner = make(qwen_path)
    micro_batch = pack(make_samples())
    learner.move_state(on_device)
    with pytest.raises(AssertionError, match="on the host"):
        learner.accumulate(micro_batch)


def test_on_a_cpu_there_is_no_memory_to_lend(qwen_path: str) -> None:
    learner = make(qwen_path)
    assert learner.keep_on_device("nothing") == 0
    assert len(learner.score((1, 2, 3))) == 2
