"""One rank of several learners, one after another, each with its own meshes. Run by test_parallel_ranks.py."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_process import gradients, weights  # in the same folder

from grmpipe.train.batching.packer import rounds_of
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner


def main(directory: str, rank: int, world_size: int, init_method: str) -> None:
    cases, max_tokens = pickle.loads((Path(directory) / "job.pkl").read_bytes())
    for name, (spec, batches, checkpoint) in cases.items():
        cp = spec.train.parallel.cp
        dp_size = world_size // cp
        learner = Learner(spec, rank, world_size, init_method)
        out: dict = {"metrics": [], "gradients": [], "sums": [], "rounds": []}
        if checkpoint is not None:
            out["loaded"] = learner.load(checkpoint)
        for step, samples in enumerate(batches):
            totals = count(samples, step)
            rounds = rounds_of(samples, max_tokens, dp_size, whole_rollouts=spec.algorithm.needs_whole_rollouts)
            out["rounds"].append(len(rounds))
            old = [None] * len(rounds)
            if spec.algorithm.updates_per_batch > 1:
                old = [learner.old_pass(round_.micro_batches[rank // cp]) for round_ in rounds]
            for round_, old_pass in zip(rounds, old, strict=True):
                out["sums"].append(learner.accumulate(round_.micro_batches[rank // cp], old_pass))
            out["old"] = old
            out["packed"] = [round_.micro_batches[rank // cp] for round_ in rounds]
            out["gradients"].append(gradients(learner, world_size / totals.num_loss_tokens))
            out["metrics"].append(learner.step(totals))
        if spec.algorithm.kl_coefficient:
            out["reference"] = [learner.reference_logprobs(micro_batch) for micro_batch in out["packed"]]
        out["score"] = learner.score((1, 2, 3, 4, 5))
        out["weights"] = weights(learner)
        learner.save(f"{directory}/{name}")
        Path(f"{directory}/{name}-{rank}.pkl").write_bytes(pickle.dumps(out))
    dist.barrier()  # neither leaves while the other waits for it
    os._exit(0)  # like a killed actor: gloo's threads sometimes abort an orderly exit


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
