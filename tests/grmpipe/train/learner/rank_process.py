"""One rank of a learner in a separate process: runs a job, writes the results. Run by test_learner_two_ranks.py."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rank_metrics import of_all_ranks
from torch.distributed.tensor import DTensor

from grmpipe.algorithm.objective import Objective
from grmpipe.config.train import AlgorithmConfig
from grmpipe.models.bucket_memory import BucketMemory
from grmpipe.models.types import CudaHandle, CudaHandles, InlineBytes, TokenScores, WeightBucket
from grmpipe.models.weights.transport_ends import UnshardedBucket, WeightTransport
from grmpipe.models.weights.transports import TRANSPORTS
from grmpipe.train.batching.packer import MicroBatchRound, Packer
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.non_finite_gradients import NonFiniteGradients
from grmpipe.types import TrainingSample


def main(job_path: str, out_dir: str, rank: int, world_size: int, init_method: str) -> None:
    spec, batches, (cut, *other_cuts), rotary_path, algorithms, mixture = pickle.loads(Path(job_path).read_bytes())
    learner = Learner(spec, rank, world_size, init_method)
    out: dict = {"metrics": [], "gradients": {}, "rounds": [], "sums": []}
    for step, samples in enumerate(batches):
        if step == len(batches) - 1:
            learner.begin_save(f"{out_dir}/checkpoint")  # and the last step is made while it is written
        rounds = rounds_as_they_come(samples, cut, world_size)
        out["rounds"].append(len(rounds))
        totals = count(samples, step)
        for round_ in rounds:
            out["sums"].append(learner.accumulate(round_.micro_batches[rank]))
        if step == 0:
            out["gradients"] = gradients(learner, world_size / totals.num_loss_tokens)
        out["metrics"].append(of_all_ranks(learner.step(totals)))
    while (saved := learner.saved()) is None:
        time.sleep(0.01)
    out["saved"] = saved
    out["weights"] = weights(learner)
    out["by_algorithm"] = {}
    for one_cut, (name, algorithm) in itertools.product((cut, *other_cuts), algorithms.items()):
        learner._spec, learner._objective = replace(spec, algorithm=algorithm), Objective.of(algorithm)
        for round_ in rounds_as_they_come(taught(samples, algorithm), one_cut, world_size):
            learner.accumulate(round_.micro_batches[rank])
        if algorithm.sft.path is not None:
            for round_ in rounds_as_they_come(demonstrated(batches[0]), one_cut, world_size):
                learner.imitate(round_.micro_batches[rank], totals)
        denominator = learner._denominator(totals)
        out["by_algorithm"][one_cut, name] = gradients(learner, world_size / denominator)
        learner.discard()
    learner._spec, learner._objective = spec, Objective.of(spec.algorithm)
    out["mixture"] = mixture_gradients(*mixture, cut, rank, world_size)
    out["score"] = learner.score((1, 2, 3, 4, 5))
    learner.export(f"{out_dir}/export")

    # With this rank's file instead of its GPU's memory.
    TRANSPORTS["cuda_ipc"] = replace(TRANSPORTS["cuda_ipc"], sender="__main__.GpuOfFiles")
    rotary = replace(spec, model_path=rotary_path, master_dtype="float32", sync_dtype="float32", transport="cuda_ipc",
                     sync_dir=f"{out_dir}/gpu-{rank}")  # fmt: skip
    of_rotary = Learner(rotary, rank, world_size)
    out["rotary_score"] = of_rotary.score((1, 2, 3, 4, 5))
    out["handed_over"] = [of_rotary.sender.bucket(index) for index in range(of_rotary.sender.num_buckets())]

    # Only one rank sees a nan; all must refuse the step.
    bad = rounds[0].micro_batches[rank]
    bad = replace(bad, advantages_E=bad.advantages_E * (float("nan") if rank == world_size - 1 else 1.0))
    learner.accumulate(bad)
    trained = int(sum(batch.loss_mask_E.sum() for batch in rounds[0].micro_batches))
    try:
        learner.step(replace(totals, num_loss_tokens=trained))
        out["refused"] = False
    except NonFiniteGradients:
        out["refused"] = True
    out["weights_after_refusal"] = weights(learner)
    out["version"] = learner.version
    out["skipped"] = learner.step(replace(totals, num_loss_tokens=0)), learner.version
    Path(f"{out_dir}/rank{rank}.pkl").write_bytes(pickle.dumps(out))
    torch.distributed.barrier()  # neither leaves while the other waits for it
    # All is written. No teardown, like a killed actor: gloo's threads sometimes abort an orderly exit ("terminate
    # called without an active exception").
    os._exit(0)


class GpuOfFiles(WeightTransport):
    """A handle that is a path in a folder, which stands for a GPU and has its name."""

    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        gpu = Path(self._folder)
        gpu.mkdir(exist_ok=True)
        memory = BucketMemory(torch.device("cpu"))
        held = memory.take(self._dtypes(bucket), bucket.shapes)
        self._fill(held, bucket)
        torch.save(memory.memory_B, gpu / str(index))
        return self._announce(bucket, held, CudaHandles(handles={gpu.name: handle_of_file(str(gpu / str(index)))}))


def handle_of_file(path: str) -> CudaHandle:
    return CudaHandle(
        memory=path.encode(), storage_bytes=0, storage_offset_bytes=0, ref_counter=b"",
        ref_counter_offset=0, event=b"", event_sync_required=False,
    )  # fmt: skip


def rounds_as_they_come(samples: list[TrainingSample], cut: tuple[int, bool], world_size: int) -> list[MicroBatchRound]:
    """Group by group, as judging ends. cut: tokens of a micro-batch, and whether siblings share their prompt."""
    max_tokens, shared = cut
    packer = Packer(max_tokens, world_size, shared)
    groups = itertools.groupby(samples, lambda sample: sample.group_id)
    return [round_ for _, group in groups for round_ in packer.add(list(group))] + packer.flush()


def taught(samples: list[TrainingSample], algorithm: AlgorithmConfig) -> list[TrainingSample]:
    """With the scores of a teacher, whose likely tokens differ by place; every third sample has none."""
    if not algorithm.distill.by_source:
        return samples
    top_k, found = algorithm.distill.top_k, []
    for number, sample in enumerate(samples):
        places_T = np.arange(len(sample.token_ids))
        top_TK = (places_T[:, None] + 7 * np.arange(top_k)).astype(np.int32) % 50
        scores = TokenScores(
            logprobs_N=np.float32(-1.0 - places_T % 3),
            top_ids_NK=top_TK,
            top_logprobs_NK=np.float32(-1.5 - top_TK % 5),
        )
        found.append(replace(sample, teacher=scores if number % 3 else None))
    return found


def demonstrated(samples: list[TrainingSample]) -> list[TrainingSample]:
    num_tokens = sum(sum(sample.loss_mask[1:]) for sample in samples)
    return [replace(one, advantages=tuple(trained / num_tokens for trained in one.loss_mask)) for one in samples]


def mixture_gradients(
    spec: LearnerSpec, samples: list[TrainingSample], cut: tuple[int, bool], rank: int, world_size: int
) -> dict:
    """The gradients of a mixture of experts whose samples have their experts."""
    learner = Learner(spec, rank, world_size)
    for round_ in rounds_as_they_come(samples, cut, world_size):
        learner.accumulate(round_.micro_batches[rank])
    return gradients(learner, world_size / count(samples, 0).num_loss_tokens)


def gradients(learner: Learner, factor: float) -> dict:
    """The gradients of trained parameters; no other has any."""
    found = {}
    for name, parameter in learner._model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if parameter.requires_grad:
            assert isinstance(parameter.grad, DTensor)
            found[name] = (parameter.grad.full_tensor() * factor).numpy()
    return found


def weights(learner: Learner) -> dict:
    """Name -> bytes, as they are sent; empty except on rank 0."""
    found = {}
    for index in range(learner.sender.num_buckets()):
        bucket = learner.sender.bucket(index)
        if bucket is not None:
            assert isinstance(bucket.payload, InlineBytes)
            found |= {tensor.name: data for tensor, data in zip(bucket.tensors, bucket.payload.data, strict=True)}
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
