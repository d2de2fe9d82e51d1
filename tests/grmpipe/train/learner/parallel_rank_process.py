"""One rank of several learners, one after another, each with its own meshes. Run by test_learner_parallel_ranks.py."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch.distributed as dist
from rank_metrics import of_all_ranks
from rank_process import gradients, weights  # in the same folder
from varlen_reference import exact_varlen

from grmpipe.models.lm import packed_attention
from grmpipe.train.batching.packer import pack_rounds
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import TrainingSample


def main(directory: str, rank: int, world_size: int, init_method: str) -> None:
    cases, max_tokens = pickle.loads((Path(directory) / "job.pkl").read_bytes())
    padded, packed_attention.varlen_attn = packed_attention._padded, exact_varlen
    for name, (spec, batches, options) in cases.items():
        packed_attention._padded = packed_attention._varlen if options.get("varlen") else padded
        learner = Learner(spec, rank, world_size, init_method)
        out: dict = {"version": learner.load(options["checkpoint"])} if "checkpoint" in options else {}
        out |= train(learner, spec, batches, max_tokens, rank, world_size)
        out["score"] = learner.score((1, 2, 3, 4, 5))
        out["weights"] = weights(learner)
        learner.save(f"{directory}/{name}")
        Path(f"{directory}/{name}-{rank}.pkl").write_bytes(pickle.dumps(out))
    dist.barrier()  # neither leaves while the other waits for it
    os._exit(0)  # like a killed actor: gloo's threads sometimes abort an orderly exit


def train(
    learner: Learner,
    spec: LearnerSpec,
    batches: list[list[TrainingSample]],
    max_tokens: int,
    rank: int,
    world_size: int,
) -> dict:
    """Ranks that share samples get the same micro-batches, as LearnerRanks deals them."""
    algorithm, cp = spec.algorithm, spec.train.parallel.cp
    out: dict = {"gradients": [], "metrics": [], "sums": [], "rounds": [], "old": [], "reference": []}
    for step, samples in enumerate(batches):
        rounds = pack_rounds(samples, max_tokens, world_size // cp, whole_rollouts=algorithm.needs_whole_rollouts)
        own = [round_.micro_batches[rank // cp] for round_ in rounds]
        out["rounds"].append(len(rounds))
        if algorithm.kl_coefficient > 0:
            out["reference"].append([(batch, learner.reference_logprobs(batch)) for batch in own])
        if algorithm.router_replay == "old_logprobs":
            out["old"].append([(batch, learner.old_pass(batch)) for batch in own])
        old = [old_pass for _, old_pass in out["old"][-1]] if out["old"] else [None] * len(own)
        out["sums"] += [learner.accumulate(batch, old_pass) for batch, old_pass in zip(own, old, strict=True)]
        totals = count(samples, step)
        out["gradients"].append(gradients(learner, world_size / totals.num_loss_tokens))
        out["metrics"].append(of_all_ranks(learner.step(totals)))
    return out


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
