"""Weights that stay on GPUs: memory of a shared GPU, NCCL between two. Marked gpu, like all of this folder."""

from __future__ import annotations

import multiprocessing
import socket
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from grmpipe.models.types import GroupLink, WeightBucket
from grmpipe.models.weights.checksums import ON_DEVICE
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors
from grmpipe.models.weights.transport_ends import open_transport
from grmpipe.models.weights.weight_stream import WeightStream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ParameterList(torch.randn(shape) for shape in ((1 << 20,), (3, 7), (0, 4), ()))


def receive(device: str, link: GroupLink | None, buckets: Any, answers: Any) -> None:
    """Receive in a separate process: the received tensors, back on the CPU, and a result per bucket."""
    group = BroadcastLink(torch.device(device))
    group.join(link)
    while (bucket := buckets.get()) is not None:
        with receive_tensors(bucket, group) as tensors:
            assert compute_checksums(tensors) == {tensor.name: tensor.checksum for tensor in bucket.tensors}
            assert all(tensor.is_cuda for _, tensor in tensors if tensor.numel())
            answers.put({announced.name: tensor.cpu().numpy() for announced, tensor in tensors})
    group.leave()


def carried(transport: str, sender_device: str, receiver_device: str, links: Any) -> None:
    spawn = multiprocessing.get_context("spawn")
    buckets, answers = spawn.Queue(), spawn.Queue()
    receiver = spawn.Process(target=receive, args=(receiver_device, links[1], buckets, answers))
    receiver.start()
    model = Layers().to(sender_device)
    stream = WeightStream(model, "float32", 1 << 10)
    sender = open_transport(transport, "float32", torch.device(sender_device), "")
    sender.connect(links[0])
    expected, came = {name: tensor.cpu() for name, tensor in model.state_dict().items()}, {}
    for index in range(stream.num_buckets):
        bucket: WeightBucket = sender.post(index, stream.unshard_bucket(index))
        assert all(tensor.checksum.startswith(ON_DEVICE) for tensor in bucket.tensors)
        buckets.put(bucket)
        sender.deliver(index)
        came |= {name: torch.from_numpy(data) for name, data in answers.get(timeout=60).items()}
    buckets.put(None)
    receiver.join(60)
    sender.close()
    assert receiver.exitcode == 0 and came.keys() == expected.keys()
    assert all(torch.equal(came[name], expected[name]) for name in came)


def test_an_engine_on_the_learners_gpu_maps_its_memory() -> None:
    carried("cuda_ipc", "cuda:0", "cuda:0", (None, None))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_broadcasts_from_one_gpu_to_another() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    link = GroupLink(
        name=f"weights-{port}", backend="nccl", address="127.0.0.1", port=port, rank=0, world_size=2, timeout_s=60.0
    )
    carried("nccl", "cuda:0", "cuda:1", (link, replace(link, rank=1)))
