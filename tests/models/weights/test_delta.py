"""Buckets as what changed in them: every bit arrives, and what can't be applied is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from grmpipe.models.types import InlineBytes, SafetensorsFile, WeightBucket, WeightDelta
from grmpipe.models.weights.delta import DeltaReceiver, DeltaSender, apply_changes, pack_changes
from grmpipe.models.weights.receive_tensors import WeightInbox, compute_checksums, receive_tensors
from grmpipe.models.weights.weight_stream import WeightStream

CPU = torch.device("cpu")


class Ends:
    """A learner's model of two buckets, and an engine's. step: change some weights, push, and return the bytes sent."""

    def __init__(self, transport: str = "object_store", folder: str = "", dtype: str = "bfloat16") -> None:
        torch.manual_seed(0)
        self.model, self.engine = (nn.Sequential(nn.Linear(60, 40), nn.Linear(40, 30)) for _ in range(2))
        self.engine.to(getattr(torch, dtype))
        self.stream = WeightStream(self.model, dtype, 5000)
        self.sender = DeltaSender(transport, dtype, folder)
        self.receiver, self.inbox = DeltaReceiver(), WeightInbox(self.engine, CPU)
        assert self.stream.num_buckets == 2

    def post(self, index: int = 0, *, is_whole: bool = False) -> WeightBucket:
        self.sender.is_whole = is_whole
        return self.sender.post(index, self.stream.unshard_bucket(index))

    @torch.no_grad()
    def change(self, share: float) -> None:
        for weight in self.model.parameters():
            weight += torch.where(torch.rand_like(weight) < share, weight / 64, 0)

    @torch.no_grad()
    def push(self, *, is_whole: bool = False) -> int:
        num_bytes = 0
        for index in range(2):
            bucket = self.post(index, is_whole=is_whole)
            num_bytes += sum(tensor.shape[0] for tensor in packed(bucket).tensors)
            self.inbox.load(self.receiver.restore(bucket))
        sums = self.inbox.collect_checksums()
        sent = {name: tensor.to(torch.bfloat16) for name, tensor in self.model.state_dict().items()}
        assert all(torch.equal(sent[name], tensor) for name, tensor in self.engine.state_dict().items())
        assert sums.keys() == sent.keys()
        return num_bytes


def packed(bucket: WeightBucket) -> WeightBucket:
    assert isinstance(bucket.payload, WeightDelta)
    return bucket.payload.packed


def checksums(bucket: WeightBucket) -> dict[str, str]:
    return {tensor.name: tensor.checksum for tensor in bucket.tensors}


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.03, 0.2])
def test_changes_lead_from_old_bytes_to_new_ones(share: float) -> None:
    generator = torch.Generator().manual_seed(1)
    old_V = torch.randint(-(1 << 15), 1 << 15, (70_001,), dtype=torch.int16, generator=generator)
    other_V = torch.randint(-(1 << 15), 1 << 15, (70_001,), dtype=torch.int16, generator=generator)
    new_V = torch.where(torch.rand(70_001, generator=generator) < share, other_V, old_V)
    packed_B = pack_changes(old_V.view(torch.uint8), new_V.view(torch.uint8))
    assert packed_B is not None and len(packed_B) < 100 + 4 * share * 70_001
    apply_changes(old_V.view(torch.uint8), packed_B)
    assert torch.equal(old_V, new_V)


@pytest.mark.parametrize("transport", ["object_store", "disk"])
def test_an_engine_has_the_learners_weights_bit_for_bit_after_whole_pushes_and_changes(
    transport: str, tmp_path: Path
) -> None:
    ends = Ends(transport, str(tmp_path))
    whole = ends.push()
    assert whole == 2 * sum(tensor.numel() for tensor in ends.model.parameters())
    for _ in range(3):
        ends.change(0.03)
        assert ends.push() < whole / 10
    ends.change(1.0)  # every value: the bytes themselves are fewer
    assert ends.push() == whole
    ends.change(0.03)
    assert ends.push(is_whole=True) == whole
    assert ends.push() < 100
    ends.sender.close()
    assert not list(tmp_path.iterdir())


def test_a_new_engine_refuses_changes_takes_the_whole_and_then_changes_as_others_do() -> None:
    ends = Ends()
    ends.push()
    ends.change(0.03)
    ends.push()
    other, new = ends.receiver, DeltaReceiver()
    with pytest.raises(ValueError, match=r"^weights: the changes from '0.weight' on apply to another push$"):
        new.restore(ends.post())
    new.restore(ends.post(is_whole=True))  # the same weights again, for it alone
    ends.change(0.03)
    bucket = ends.post()
    for receiver in (other, new):
        with receive_tensors(receiver.restore(bucket)) as tensors:
            assert compute_checksums(tensors) == checksums(bucket)


def test_a_push_that_an_engine_missed_is_no_base_and_neither_is_one_that_failed() -> None:
    ends = Ends()
    ends.push()
    ends.change(0.03)
    ends.post()
    ends.change(0.03)
    after = ends.post()
    with pytest.raises(ValueError, match="apply to another push"):
        ends.receiver.restore(after)
    with pytest.raises(ValueError, match="apply to another push"):  # not even its own former base is kept
        ends.receiver.restore(after)
    ends.push(is_whole=True)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("transport", ["object_store", "disk"])
def test_damaged_bytes_are_refused_by_name(transport: str, is_whole: bool, tmp_path: Path) -> None:
    ends = Ends(transport, str(tmp_path))
    ends.push()
    ends.change(0.03)
    bucket = ends.post(is_whole=is_whole)
    payload = packed(bucket).payload
    if isinstance(payload, SafetensorsFile):
        raw = bytearray(Path(payload.path).read_bytes())
        raw[-1] ^= 1
        Path(payload.path).write_bytes(raw)
    else:
        assert isinstance(payload, InlineBytes)
        payload.data[0][-1] ^= 1
    with pytest.raises(ValueError, match="^weights: bucket 0 arrived damaged, at '0.weight'$"):
        ends.receiver.restore(bucket)


def test_checksums_are_of_the_result_so_that_a_wrong_base_shows() -> None:
    ends = Ends()
    kept = ends.receiver.restore(ends.post())
    assert isinstance(kept.payload, InlineBytes)
    kept.payload.data[0][7] ^= 1  # the engine's copy
    ends.change(0.03)
    bucket = ends.post()
    with receive_tensors(ends.receiver.restore(bucket)) as tensors:
        sums = compute_checksums(tensors)
    assert {name for name, checksum in checksums(bucket).items() if sums[name] != checksum} == {"0.weight"}


def test_other_buckets_pass_as_they_are() -> None:
    bucket = WeightBucket(tensors=(), payload=InlineBytes(data=(np.zeros(1, np.uint8),)))
    assert DeltaReceiver().restore(bucket) is bucket
