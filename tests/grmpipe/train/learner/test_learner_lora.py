"""A learner of adapters on one rank: what is trained, and the reference of a KL. Two ranks are in
test_learner_lora_ranks.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.settings import LoraConfig
from grmpipe.train.batching.packer import pack
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec


@pytest.fixture
def spec(qwen_path: str, tmp_path: Path) -> LearnerSpec:
    return LearnerSpec(
        model_path=qwen_path,
        train=TrainConfig(lr=1e-2, warmup_steps=0, activation_checkpointing="full"),
        algorithm=AlgorithmConfig(kl_coefficient=0.5),
        max_new_tokens=8,
        device="cpu",
        lora=LoraConfig(rank=4, alpha=8.0),
        adapter_dir=str(tmp_path / "adapter"),
    )


def test_the_reference_is_the_model_without_its_adapters(spec: LearnerSpec, qwen_path: str, make_samples) -> None:
    """No second copy exists, and a pass of it doesn't change the gradients."""
    batch, totals = pack(make_samples()), count(make_samples(), 0)
    plain = Learner(replace(spec, lora=LoraConfig())).old_pass(batch).logprobs_T
    learner = Learner(spec)
    assert learner._reference is None
    learner.accumulate(batch)
    assert learner.step(totals)["train/kl_nats"] == pytest.approx(0.0, abs=1e-6)
    now = learner.old_pass(batch).logprobs_T.astype(np.float64)
    np.testing.assert_allclose(learner.reference_logprobs(batch), plain, atol=1e-6)
    learner.accumulate(batch)
    x = (plain - now)[batch.loss_mask_E > 0]
    assert learner.step(totals)["train/kl_nats"] == pytest.approx(np.mean(np.exp(x) - 1 - x), rel=1e-3)
    assert np.abs(x).max() > 1e-3


def test_the_optimizer_and_the_step_are_of_adapters_alone(spec: LearnerSpec, make_samples) -> None:
    learner = Learner(spec)
    before = {name: parameter.detach().full_tensor().clone() for name, parameter in learner._model.named_parameters()}
    for _ in range(2):
        learner.accumulate(pack(make_samples()))
        learner.step(count(make_samples(), 0))
    changed = {
        name for name, parameter in learner._model.named_parameters()
        if not torch.equal(parameter.detach().full_tensor(), before[name])
    }  # fmt: skip
    assert changed == {name for name in before if ".lora_" in name}
    assert len(learner._optimizer.state) == len(changed)


def test_in_bfloat16_what_is_frozen_takes_two_bytes_and_what_learns_four(spec: LearnerSpec, make_samples) -> None:
    learner = Learner(replace(spec, train=replace(spec.train, dtype="bfloat16")))
    sizes = {parameter.requires_grad: parameter.dtype for parameter in learner._model.parameters()}
    assert sizes == {True: torch.float32, False: torch.bfloat16}
    learner.accumulate(pack(make_samples()))
    assert np.isfinite(learner.step(count(make_samples(), 0))["train/grad_norm"])


def test_only_the_first_push_is_of_everything(spec: LearnerSpec) -> None:
    merged, alone = Learner(spec), Learner(replace(spec, lora=replace(spec.lora, sync="adapters")))
    assert 0 < merged.sender.num_fixed_buckets() < merged.sender.num_buckets()
    assert (alone.sender.num_fixed_buckets(), alone.sender.num_buckets()) == (0, 1)
