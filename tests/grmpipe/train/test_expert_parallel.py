"""Experts that are divided over ranks: the same gradients, norms, weights, checkpoints and pushes as one rank."""

from __future__ import annotations

import pickle
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from expert_ranks import Case, Result, divided, run_case
from forks import Forked

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import TrainingSample

SCRIPT = Path(__file__).parents[2] / "expert_ranks.py"
WAYS = {
    "ep 4": {"ep": 4},
    "ep 2 x fsdp 2": {"ep": 2},
    "ep 2 x 2 copies": {"ep": 2, "dp_replicate": 2},
}


def with_experts(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Experts that no router would choose: two of four in each of two layers; siblings agree on their prompt's."""
    chosen = []
    for sample in samples:
        places = np.arange(len(sample.token_ids)) + np.array(sample.token_ids)
        first_TL = (places[:, None] + np.arange(2)) % 4
        second_TL = (first_TL + 1 + places[:, None] % 3) % 4
        chosen.append(replace(sample, experts_TLK=np.stack([first_TL, second_TL], axis=-1).astype(np.int16)))
    return chosen


@pytest.fixture(scope="module")
def case(mixture_path: str, make_siblings) -> Case:
    """Two batches; siblings share their prompts. The second batch is a single sample: the other ranks are idle."""
    spec = LearnerSpec(
        model_path=mixture_path,
        train=TrainConfig(lr=1e-2, warmup_steps=0, max_grad_norm=0.3),
        algorithm=AlgorithmConfig(),
        max_new_tokens=8,
        device="cpu",
    )
    return Case(spec=spec, batches=tuple(make_siblings(num_samples, seed) for seed, num_samples in enumerate((17, 1))))


@pytest.fixture(scope="module")
def replayed(case: Case) -> Case:
    spec = replace(
        case.spec,
        algorithm=AlgorithmConfig(router_replay="rollout"),
        train=replace(case.spec.train, activation_checkpointing=True),
    )
    return replace(case, spec=spec, batches=(with_experts(case.batches[0]),))


def run_ranks(forked: type[Forked], directory: Path, cases: dict[str, Case], num_ranks: int) -> list[dict[str, Result]]:
    """Each rank's results."""
    (directory / "job.pkl").write_bytes(pickle.dumps(cases))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        forked(SCRIPT, directory / "job.pkl", directory, rank, num_ranks, address) for rank in range(num_ranks)
    ]
    for process in processes:
        assert process.wait(120) == 0, process.output[-3000:]
    return [pickle.loads((directory / f"rank{rank}.pkl").read_bytes()) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def four(case: Case, replayed: Case, forked: type[Forked], tmp_path_factory: pytest.TempPathFactory):
    cases = {name: divided(case, **way) for name, way in WAYS.items()}
    cases |= {f"{name}, replayed": divided(replayed, **way) for name, way in WAYS.items()}
    return run_ranks(forked, tmp_path_factory.mktemp("four"), cases, 4)


@pytest.fixture(scope="module")
def one(case: Case, replayed: Case) -> dict[str, Result]:
    return {"": run_case(case, 0, 1, None), ", replayed": run_case(replayed, 0, 1, None)}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        scale = np.abs(values).max()
        assert scale > 0, f"{name} has nothing to compare"
        np.testing.assert_allclose(found[name], values, atol=tolerance * scale, rtol=0, err_msg=name)


@pytest.mark.parametrize("kind", ["", ", replayed"])
@pytest.mark.parametrize("way", sorted(WAYS))
def test_gradients_norms_and_weights_are_those_of_one_rank(one, four, way: str, kind: str) -> None:
    expected, found = one[kind], four[0][way + kind]
    assert_same(found.gradients, expected.gradients, 1e-5)
    for mine, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert expected.metrics[0]["train/grad_norm"] > 0.3, "nothing is clipped"
    assert_same(found.weights, expected.weights, 1e-4)
    assert found.score == pytest.approx(expected.score, abs=1e-4)
