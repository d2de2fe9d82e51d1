"""Four ranks in any meshes are one learner: copies of the model (HSDP), shared samples (Ulysses), and both. In float64.

Each set of processes is spawned once, and runs one learner after another.
"""

from __future__ import annotations

import pickle
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import Forked
from transformers import Starcoder2Config, Starcoder2ForCausalLM

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.train.batching.packer import rounds_of
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import Metrics, TrainingSample
from models.settings import ParallelConfig
from models.types import InlineBytes

SCRIPT = Path(__file__).with_name("parallel_rank_process.py")
RANKS = 4
PIECES = 66  # packed tokens of a micro-batch, on all ranks that share it: an odd number for each of four, and of five
MESHES = {
    "copies": ParallelConfig(dp_replicate=2),
    "shared": ParallelConfig(cp=4),
    "shared_and_sharded": ParallelConfig(cp=2),
    "all": ParallelConfig(dp_replicate=2, cp=2),
}
Case = tuple[LearnerSpec, list[list[TrainingSample]], str | None]


@dataclass(frozen=True, slots=True)
class Run:
    directory: Path

    def rank(self, case: str, rank: int) -> dict:
        return pickle.loads((self.directory / f"{case}-{rank}.pkl").read_bytes())

    def ranks(self, case: str) -> list[dict]:
        return [self.rank(case, rank) for rank in range(RANKS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What one rank makes of all batches, each in one micro-batch with a copy of the prompt for each sample."""

    gradients: list[dict[str, np.ndarray]]
    metrics: list[Metrics]
    weights: dict[str, np.ndarray]
    score: tuple[float, ...]
    learner: Learner


def run(forked: type[Forked], directory: Path, cases: dict[str, Case], max_tokens: int = PIECES) -> Run:
    """A second try if a signal ended a rank: see test_two_ranks.py."""
    (directory / "job.pkl").write_bytes(pickle.dumps((cases, max_tokens)))
    for _ in range(2):
        address = free_address()
        processes = [forked(SCRIPT, directory, rank, RANKS, address) for rank in range(RANKS)]
        codes = [process.wait(240) for process in processes]
        if min(codes) >= 0:
            break
    for code, process in zip(codes, processes, strict=True):
        assert code == 0, process.output[-3000:]
    return Run(directory)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def alone(spec: LearnerSpec, batches: list[list[TrainingSample]]) -> Alone:
    learner = Learner(spec)
    gradients, metrics = [], []
    for step, samples in enumerate(batches):
        totals = count(samples, step)
        (round_,) = rounds_of(samples, 10_000, 1, shared=False)
        learner.accumulate(round_.micro_batches[0])
        gradients.append(
            {
                name: (parameter.grad.full_tensor() / totals.num_loss_tokens).numpy()
                for name, parameter in learner._model.named_parameters()
                if parameter.requires_grad
            }
        )
        metrics.append(learner.step(totals))
    score = learner.score((1, 2, 3, 4, 5))
    return Alone(gradients=gradients, metrics=metrics, weights=pushed(learner), score=score, learner=learner)


def pushed(learner: Learner) -> dict[str, np.ndarray]:
    found = {}
    for index in range(learner.num_buckets()):
        bucket = learner.bucket(index)
        assert bucket is not None and isinstance(bucket.payload, InlineBytes)
        for tensor, data in zip(bucket.tensors, bucket.payload.data, strict=True):
            found[tensor.name] = data.view(np.float64)
    return found


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> LearnerSpec:
    """A family that computes in float64 throughout, with fewer key heads than ranks and a window."""
    path = tmp_path_factory.mktemp("starcoder")
    torch.manual_seed(0)
    Starcoder2ForCausalLM(
        Starcoder2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, sliding_window=7, residual_dropout=0.0,
            embedding_dropout=0.0, initializer_range=0.2,
        )
    ).save_pretrained(path)  # fmt: skip
    return LearnerSpec(
        model_path=str(path),
        train=TrainConfig(lr=1e-3, warmup_steps=0, activation_checkpointing=True),
        algorithm=AlgorithmConfig(entropy_coefficient=0.01, correction="sequence_tis"),
        max_new_tokens=8,
        device="cpu",
        master_dtype="float64",
        sync_dtype="float64",
        bucket_bytes=20_000,
    )


@pytest.fixture(scope="module")
def batches(make_siblings) -> list:
    """The second batch is a single sample: work for one rank, or for those that share it."""
    return [make_siblings(num_samples, seed) for seed, num_samples in enumerate((17, 1, 17))]


def with_meshes(spec: LearnerSpec, parallel: ParallelConfig) -> LearnerSpec:
    return replace(spec, train=replace(spec.train, parallel=parallel))


@pytest.fixture(scope="module")
def one(spec: LearnerSpec, batches: list) -> Alone:
    return alone(spec, batches)


@pytest.fixture(scope="module")
def four(spec: LearnerSpec, batches: list, forked: type[Forked], tmp_path_factory: pytest.TempPathFactory) -> Run:
    cases = {name: (with_meshes(spec, parallel), batches, None) for name, parallel in MESHES.items()}
    return run(forked, tmp_path_factory.mktemp("four"), cases)


@pytest.mark.parametrize("case", MESHES)
def test_gradients_and_metrics_are_those_of_one_rank(one: Alone, four: Run, case: str) -> None:
    for rank in four.ranks(case):
        assert max(rank["rounds"]) > 1
        for step, expected in enumerate(one.gradients):
            for name, whole in expected.items():
                np.testing.assert_allclose(rank["gradients"][step][name], whole, atol=1e-10, rtol=0, err_msg=name)
                assert np.abs(whole).max() > 1e-6, f"{name} has no gradient to compare"
            assert rank["metrics"][step] == pytest.approx(one.metrics[step], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("case", MESHES)
def test_pushed_weights_and_scores_are_those_of_one_rank(one: Alone, four: Run, case: str) -> None:
    first, *others = four.ranks(case)
    assert first["weights"].keys() == one.weights.keys() and not any(rank["weights"] for rank in others)
    for name, data in one.weights.items():
        np.testing.assert_allclose(first["weights"][name].view(np.float64), data, atol=1e-9, err_msg=name)
    for rank in (first, *others):
        assert rank["score"] == pytest.approx(one.score, abs=1e-9)


@pytest.mark.parametrize("case", ["shared", "shared_and_sharded", "all"])
def test_ranks_that_share_samples_give_the_same_sums_to_the_last_bit(four: Run, case: str) -> None:
    ranks = four.ranks(case)
    cp = MESHES[case].cp
    for first in range(0, RANKS, cp):
        for other in range(first + 1, first + cp):
            assert ranks[other]["sums"] == ranks[first]["sums"]
    trained = [sum(sums["train/tokens_sum"] for sums in rank["sums"]) for rank in ranks]
    assert cp == RANKS or trained[0] != trained[cp], "the groups have different samples"


@pytest.mark.parametrize("case", MESHES)
def test_saved_in_meshes_goes_on_identically_on_one_rank(
    four: Run, spec: LearnerSpec, batches: list, one: Alone, case: str
) -> None:
    learner = Learner(spec)
    assert learner.load(str(four.directory / case)) == 3
    for name, data in pushed(learner).items():
        np.testing.assert_allclose(data, one.weights[name], atol=1e-9, err_msg=name)
