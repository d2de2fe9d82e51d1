"""Memory of a GPU is shared once, however many buckets pass through it. Without a GPU: torch's sharing is replaced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from grmpipe.models.types import CudaHandle
from grmpipe.models.weights import cuda_ipc
from grmpipe.models.weights.cuda_ipc import CudaMemory, SharedMemoryOfGpu
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors
from grmpipe.models.weights.transport_ends import CPU, WeightTransport
from grmpipe.models.weights.weight_stream import WeightStream


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.randn(shape) for shape in ((3, 5), (), (0, 4), (7,), (64,), (2, 2)))


def test_an_arena_is_shared_once_and_every_bucket_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[Tensor] = []

    def reduce(memory_B: Tensor) -> tuple[object, tuple[object, ...]]:
        shared.append(memory_B)
        number = str(len(shared) - 1).encode()
        return None, (None,) * 7 + (number, memory_B.nbytes, 0, False, b"", 0, b"", False)

    def open_shared(handle: CudaHandle, device: int) -> Tensor:
        return shared[int(handle.memory)]

    monkeypatch.setattr(cuda_ipc, "reduce_tensor", reduce)
    monkeypatch.setattr(cuda_ipc, "map_handle", open_shared)
    monkeypatch.setattr(cuda_ipc, "gpus_seen", lambda: range(1))
    monkeypatch.setattr(cuda_ipc, "gpu_id", lambda device: "gpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    sender = CudaMemory.__new__(CudaMemory)
    WeightTransport.__init__(sender, "bfloat16")
    sender._arenas = SharedMemoryOfGpu(CPU), SharedMemoryOfGpu(CPU)
    model = Layers()
    stream = WeightStream(model, "bfloat16", 150)
    assert stream.num_buckets == 2
    for _ in range(5):
        with torch.no_grad():
            model.layers[0].mul_(2)
        came: dict[str, Tensor] = {}
        for index in range(2):
            bucket = sender.post(index, stream.unshard_bucket(index))
            with receive_tensors(bucket) as tensors:
                assert compute_checksums(tensors) == {tensor.name: tensor.checksum for tensor in bucket.tensors}
                came |= {announced.name: tensor.clone() for announced, tensor in tensors}
        assert all(torch.equal(came[name], held.bfloat16()) for name, held in model.state_dict().items())
    assert len(shared) == 2, "one for each arena"
    larger = nn.Module()
    larger.weight = nn.Parameter(torch.randn(4096))
    sender.post(0, WeightStream(larger, "bfloat16", 1 << 20).unshard_bucket(0))
    assert len(shared) == 3 and shared[2].nbytes >= 8192, "memory that grew is other memory"
