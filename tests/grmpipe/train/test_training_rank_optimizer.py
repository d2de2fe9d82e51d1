"""Learning rates by step; moments that wait on the host."""

from __future__ import annotations

import pickle
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import Forked
from torch import Tensor
from torch.distributed.tensor import DTensor

from grmpipe.config.train import AlgorithmConfig, OptimizerConfig, TrainConfig
from grmpipe.models.lm import causal_lm
from grmpipe.train.batching.packer import pack
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.offload import OffloadingLearner
from grmpipe.train.training_rank import iterate_moments, schedule_lr

SCRIPT = Path(__file__).parent / "learner" / "lora_rank_process.py"  # it runs any learner


def rates(schedule: str) -> list[float]:
    config = TrainConfig(num_steps=6, warmup_steps=2, lr=3.0, schedule=schedule)
    return [schedule_lr(step, config) for step in range(7)]


def test_a_constant_rate_follows_the_warm_up() -> None:
    assert rates("constant") == pytest.approx([1, 2, 3, 3, 3, 3, 3])


def test_linear_decay_learns_on_the_last_step() -> None:
    assert rates("linear") == pytest.approx([1, 2, 3, 2.25, 1.5, 0.75, 0])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates("cosine")[4] == pytest.approx(1.5)
    assert sorted(rates("cosine")[2:], reverse=True) == rates("cosine")[2:]


def test_no_warm_up_starts_at_full_rate() -> None:
    assert schedule_lr(0, TrainConfig(warmup_steps=0, lr=0.5)) == 0.5


def test_several_updates_warm_up_within_the_same_batches() -> None:
    config = TrainConfig(num_steps=6, warmup_steps=2, lr=3.0)
    assert [schedule_lr(step / 2, config) for step in range(6)] == pytest.approx([1, 1.5, 2, 2.5, 3, 3])


def spec_of(path: str, **train: object) -> LearnerSpec:
    return LearnerSpec(
        model_path=path,
        train=TrainConfig(lr=3e-3, warmup_steps=0, **train),  # type: ignore[arg-type]
        algorithm=AlgorithmConfig(correction="none"),
        max_new_tokens=8,
        device="cpu",
    )


def trained(learner: Learner, make_samples, steps: range) -> list[float]:  # type: ignore[no-untyped-def]
    norms = []
    for step in steps:
        samples = make_samples(12, seed=step)
        learner.accumulate(pack(samples))
        norms.append(learner.step(count(samples, step))["train/grad_norm"])
    return norms


def weights(learner: Learner) -> list[Tensor]:
    return [parameter.full_tensor().clone() for parameter in learner._model.parameters()]  # type: ignore[attr-defined]


def test_moments_wait_on_the_host_and_change_no_step(qwen_path: str, make_samples, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    here = Learner(spec_of(qwen_path))
    away = OffloadingLearner(spec_of(qwen_path, optimizer=OptimizerConfig(offload=True)))
    for learner in (here, away):
        trained(learner, make_samples, range(2))
    away.move_state("nothing")  # also on a device that engines share
    away.move_state("everything")
    held = [
        sum(_local(moment).untyped_storage().nbytes() for moment in iterate_moments(o._optimizer)) for o in (here, away)
    ]
    assert held[0] > 10_000 and held[1] == 0
    away.save(str(tmp_path / "away"))
    resumed = Learner(spec_of(qwen_path))
    resumed.load(str(tmp_path / "away"))
    for learner in (here, away, resumed):
        trained(learner, make_samples, range(2, 3))
    for ours, theirs, others in zip(weights(here), weights(away), weights(resumed), strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours, others)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_two_ranks_with_every_memory_option_are_one_rank_with_none(
    qwen_path: str, make_samples, forked: type[Forked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    """Gradients of three steps, with checkpointed and offloaded activations, chunks of the head, moments that wait on
    the host; and their checkpoint goes on identically on one rank.
    """
    plain = spec_of(qwen_path)
    saving = spec_of(
        qwen_path, optimizer=OptimizerConfig(offload=True), activation_checkpointing="selective",
        activation_offload=True, fp32_modules=["lm_head"],
    )  # fmt: skip
    batches = [make_samples(13, seed) for seed in range(3)]
    (tmp_path / "job.pkl").write_bytes(pickle.dumps((saving, batches, 40)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    for process in [forked(SCRIPT, tmp_path, rank, 2, address) for rank in range(2)]:
        assert process.wait(120) == 0, process.output[-3000:]
    ranks = [pickle.loads((tmp_path / f"rank{rank}.pkl").read_bytes()) for rank in range(2)]
    learner = Learner(plain)
    for step, samples in enumerate(batches):
        learner.accumulate(pack(samples))
        totals = count(samples, step)
        for name, parameter in learner._model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            whole = (parameter.grad.full_tensor() / totals.num_loss_tokens).numpy()
            off = np.linalg.norm(ranks[1]["gradients"][step][name] - whole) / np.linalg.norm(whole)
            assert off < 1e-4, (step, name)  # AdamW's first steps magnify a CPU's rounding of float32
        assert of_run(ranks[0]["metrics"][step]) == pytest.approx(of_run(learner.step(totals)), rel=1e-3, abs=1e-5)
    resumed = Learner(saving)
    assert resumed.load(str(tmp_path / "checkpoint")) == 2
    monkeypatch.setattr(causal_lm, "CHUNK_LOGITS", 500)
    resumed.accumulate(pack(batches[2]))
    metrics = of_run(resumed.step(count(batches[2], 2)))
    assert metrics == pytest.approx(of_run(ranks[0]["metrics"][2]), rel=1e-4, abs=1e-5)


def of_run(metrics: dict[str, float]) -> dict[str, float]:
    """Those that all ranks together have: not a rank's speed and memory."""
    return {name: value for name, value in metrics.items() if not name.startswith("rank/")}
