"""A receiver of weights in a separate process: commands come pickled on stdin. Run by test_receiving.py."""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grmpipe.models.types import GroupLink, WeightBucket
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors

group = BroadcastLink()
native: list[dist.ProcessGroup] = []


def load(bucket: WeightBucket) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    with receive_tensors(bucket, group) as tensors:
        return compute_checksums(tensors), {announced.name: tensor.clone() for announced, tensor in tensors}


def receive_then(bucket: WeightBucket, then: str) -> None:
    """Take one broadcast of two."""
    load(bucket)
    if then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def join_as_sglang(link: GroupLink) -> None:
    """Join as SGLang's `init_custom_process_group` does."""
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world, rendezvous

    timeout = timedelta(seconds=link.timeout_s)
    address = f"tcp://{link.address}:{link.port}"
    store, rank, world_size = next(rendezvous(address, link.rank, link.world_size, timeout=timeout))
    store.set_timeout(timeout)
    store = dist.PrefixStore(link.name, store)
    joined, _ = _new_process_group_helper(
        world_size, rank, [], dist.Backend(link.backend), store, group_name=link.name, timeout=timeout
    )
    _world.pg_group_ranks[joined] = {i: i for i in range(world_size)}
    native[:] = [joined]


def load_as_sglang(bucket: WeightBucket) -> dict[str, torch.Tensor]:
    """Receive as SGLang's `FlattenedTensorBucket` (weight_sync/tensor_bucket.py of 0.5.23): bytes without gaps."""
    sizes = [math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize for tensor in bucket.tensors]
    flattened = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(flattened, src=0, group=native[0])
    came, start = {}, 0
    for tensor, size in zip(bucket.tensors, sizes, strict=True):
        held = flattened[start : start + size].view(getattr(torch, tensor.dtype))
        came[tensor.name] = held.reshape(tensor.shape)
        start += size
    return came


COMMANDS: dict[str, Any] = {
    "join": group.join,
    "load": load,
    "receive_then": receive_then,
    "join_as_sglang": join_as_sglang,
    "load_as_sglang": load_as_sglang,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    while True:
        try:
            command, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            answer = COMMANDS[command](*arguments)
        except (ValueError, ConnectionError) as error:
            answer = error
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    os._exit(0)  # gloo's threads sometimes abort an orderly exit
