"""A user's own weight transport: one file with both ends, named by its dotted path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors
from grmpipe.models.weights.transport_ends import open_transport
from grmpipe.models.weights.weight_stream import WeightStream

SOURCE = """
from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from grmpipe.models.types import Payload, TransportKind, WeightBucket, WeightTensor
from grmpipe.models.weights.transport_ends import open_bucket, parse_dtype
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.transport_ends import UnshardedBucket, WeightTransport


class Letter(Payload, msgspec.Struct, frozen=True, kw_only=True, tag=True):
    text: tuple[str, ...]


class Pigeons(WeightTransport):
    def post(self, index: int, bucket: UnshardedBucket) -> WeightBucket:
        sent = [tensor.detach().to(getattr(torch, self._dtype)) for tensor in bucket.tensors]
        text = tuple(tensor.reshape(-1).view(torch.uint8).numpy().tobytes().hex() for tensor in sent)
        return self._announce(bucket, sent, Letter(text=text))


@open_bucket.register
def _(payload: Letter, tensors: Sequence[WeightTensor], group: BroadcastLink | None = None) -> list[Tensor]:
    raw = [torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in payload.text]
    return [bytes_B.view(parse_dtype(tensor)).view(tensor.shape) for bytes_B, tensor in zip(raw, tensors, strict=True)]


PIGEON = TransportKind(name="pigeon", sender="users_pigeons.Pigeons")
"""


@pytest.fixture
def loft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_pigeons.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("loft")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_payload_carries_weights_from_one_end_to_the_other(dtype: str) -> None:
    model = nn.Linear(5, 3)
    stream = WeightStream(model, dtype, 1 << 20)
    sender = open_transport("users_pigeons.PIGEON", dtype)
    bucket = sender.post(0, stream.unshard_bucket(0))
    with receive_tensors(bucket) as tensors:
        assert compute_checksums(tensors) == {tensor.name: tensor.checksum for tensor in bucket.tensors}
        came = {announced.name: tensor for announced, tensor in tensors}
    assert torch.equal(came["weight"], model.weight.to(getattr(torch, dtype)))
    assert torch.equal(came["bias"], model.bias.to(getattr(torch, dtype)))
