"""One rank of learners of a mixture in a separate process, for several ways to divide the experts. Run by
test_learner_expert_ranks.py.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from grmpipe.models.settings import ParallelConfig
from grmpipe.models.types import InlineBytes
from grmpipe.train.batching.packer import Packer
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import Metrics, TrainingSample


@dataclass(frozen=True)
class Case:
    """Two steps of a learner. load: a checkpoint to begin with; save: where to write one after the first step."""

    spec: LearnerSpec
    batches: tuple[list[TrainingSample], ...]
    max_tokens: int = 66
    shared: bool = True
    load: str = ""
    save: str = ""
    export: str = ""


@dataclass(frozen=True)
class Result:
    """gradients: of the first batch, whole; weights: sent after the last one, on rank 0."""

    gradients: dict[str, np.ndarray]
    metrics: list[Metrics]
    weights: dict[str, np.ndarray]
    shard_elements: dict[str, int]
    largest_bucket: int
    score: tuple[float, ...]
    saved: str


def run_case(case: Case, rank: int, world_size: int, init_method: str | None) -> Result:
    learner = Learner(case.spec, rank, world_size, init_method)
    if case.load:
        learner.load(case.load)
    metrics, found = [], {}
    cp = case.spec.train.parallel.cp
    for step, samples in enumerate(case.batches):
        packer, totals = Packer(case.max_tokens, world_size // cp, case.shared), count(samples, step)
        for round_ in packer.add(samples) + packer.flush():
            learner.accumulate(round_.micro_batches[rank // cp])
        if step == 0:
            found = gradients(learner, world_size / totals.num_loss_tokens)
        metrics.append(learner.step(totals))
        if case.save and step == 0:
            learner.save(case.save)
            learner.saved()
    if case.export:
        learner.export(case.export)
    weights, largest_bucket = sent(learner)
    return Result(
        gradients=found,
        metrics=metrics,
        weights=weights,
        shard_elements={name: own(parameter).numel() for name, parameter in learner._model.named_parameters()},
        largest_bucket=largest_bucket,
        score=learner.score((1, 2, 3, 4, 5)),
        saved=case.save,
    )


def own(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def gradients(learner: Learner, factor: float) -> dict[str, np.ndarray]:
    found = {}
    for name, parameter in learner._model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if isinstance(parameter.grad, DTensor):
            found[name] = (parameter.grad.full_tensor() * factor).numpy()
    return found


def sent(learner: Learner) -> tuple[dict[str, np.ndarray], int]:
    """Name -> what engines get, empty except on rank 0; the most values of a bucket."""
    found: dict[str, np.ndarray] = {}
    largest = 0
    for index in range(learner.sender.num_buckets()):
        if (bucket := learner.sender.bucket(index)) is not None:
            assert isinstance(bucket.payload, InlineBytes)
            largest = max(largest, sum(len(data) for data in bucket.payload.data))
            for tensor, data in zip(bucket.tensors, bucket.payload.data, strict=True):
                assert tensor.name not in found
                found[tensor.name] = data.view(np.float32).reshape(tensor.shape)
    return found, largest


def main(job_path: str, out_dir: str, rank: int, world_size: int, init_method: str) -> None:
    cases: dict[str, Case] = pickle.loads(Path(job_path).read_bytes())
    results = {name: run_case(case, rank, world_size, init_method) for name, case in cases.items()}
    Path(f"{out_dir}/rank{rank}.pkl").write_bytes(pickle.dumps(results))

    torch.distributed.barrier()  # neither leaves while the other waits for it
    os._exit(0)  # gloo's threads sometimes abort an orderly exit


def divided(case: Case, **parallel: int) -> Case:
    train = replace(case.spec.train, parallel=ParallelConfig(**parallel))
    return replace(case, spec=replace(case.spec, train=train))


if __name__ == "__main__":
    from expert_rank_process import main  # results must not be of classes of __main__

    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
