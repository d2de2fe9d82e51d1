"""One rank of a sharded model that posts its weights into shared memory. Run by test_receiving.py.

Rank 0 writes its whole model's state first, then each bucket, pickled, to stdout; it continues when stdin says so.
"""

from __future__ import annotations

import os
import pickle
import sys

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from grmpipe.models.lm.parallel.ranks import join_ranks
from grmpipe.models.lm.parallelize import parallelize
from grmpipe.models.weights.shared_memory import SharedMemoryFiles
from grmpipe.models.weights.weight_stream import WeightStream


def main(rank: int, world_size: int, init_method: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=67, hidden_size=18, intermediate_size=33, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=1, head_dim=6, max_position_embeddings=64, tie_word_embeddings=True,
        )
    )  # fmt: skip
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = join_ranks(rank, world_size, init_method, torch.device("cpu"))
    parallelize(model, mesh, "float32")
    stream = WeightStream(model, "bfloat16", 3000)
    transport = SharedMemoryFiles("bfloat16") if rank == 0 else None
    if transport is not None:
        tell(whole)
        tell(stream.num_buckets)
    for index in range(stream.num_buckets):
        bucket = stream.unshard_bucket(index)
        if transport is None:
            bucket.drain()
        else:
            tell(transport.post(index, bucket))
            sys.stdin.readline()
    dist.barrier()
    if transport is not None:
        transport.close()
    os._exit(0)


def tell(what: object) -> None:
    pickle.dump(what, sys.stdout.buffer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
