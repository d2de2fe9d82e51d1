"""One rank of a learner of adapters in a separate process. Run by test_learner_lora_ranks.py."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch
from rank_metrics import of_all_ranks
from rank_process import gradients, weights  # in the same folder

from grmpipe.train.batching.packer import pack_rounds
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner


def main(directory: str, rank: int, world_size: int, init_method: str) -> None:
    spec, batches, max_tokens = pickle.loads((Path(directory) / "job.pkl").read_bytes())
    learner = Learner(spec, rank, world_size, init_method)
    out: dict = {"metrics": [], "gradients": []}
    for step, samples in enumerate(batches):
        if step == len(batches) - 1:
            learner.save(f"{directory}/checkpoint")
        for round_ in pack_rounds(samples, max_tokens, world_size):
            learner.accumulate(round_.micro_batches[rank])
        totals = count(samples, step)
        out["gradients"].append(gradients(learner, world_size / totals.num_loss_tokens))
        out["metrics"].append(of_all_ranks(learner.step(totals)))
    out["weights"] = weights(learner)
    learner.export(f"{directory}/policy")
    Path(f"{directory}/rank{rank}.pkl").write_bytes(pickle.dumps(out))
    torch.distributed.barrier()  # neither leaves while the other waits for it
    os._exit(0)  # like a killed actor: gloo's threads sometimes abort an orderly exit


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
