"""Buckets and errors are sent to vLLM's worker as plain values, and restored there."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from grmpipe.models.checksum import checksum
from grmpipe.models.engines.vllm.vllm_weights import (
    Applied,
    PlainBucket,
    as_plain,
    decode_errors,
    encode_errors,
    find_unapplied,
    under_sent_names,
)
from grmpipe.models.types import (
    Broadcast,
    CudaHandle,
    CudaHandles,
    InlineBytes,
    ModelFiles,
    Payload,
    SafetensorsFile,
    SharedMemory,
    WeightBucket,
    WeightTensor,
)
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors
from grmpipe.models.weights.weight_files import SharedArena

HANDLE = CudaHandle(
    memory=b"\x00\xff", storage_bytes=48, storage_offset_bytes=0, ref_counter=b"\x01", ref_counter_offset=3, event=b"",
    event_sync_required=True,
)  # fmt: skip


def bucket_with(payload: Payload) -> WeightBucket:
    tensor = WeightTensor(name="a.weight", dtype="float32", shape=(2, 3), checksum="c")
    return WeightBucket(tensors=(tensor,), payload=payload)


@pytest.mark.parametrize(
    "payload",
    [
        SharedMemory(path="/dev/shm/x"),
        SafetensorsFile(path="/shared/x.safetensors"),
        Broadcast(),
        CudaHandles(handles={"uuid": HANDLE}),
        ModelFiles(path="/models/x"),
    ],
)
def test_a_bucket_crosses_msgpack_unchanged(payload: Payload) -> None:
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(as_plain(bucket_with(payload), SharedArena())))
    assert PlainBucket(**crossed).restore_bucket() == bucket_with(payload)


def test_inline_bytes_cross_through_shared_memory_bucket_after_bucket() -> None:
    arena = SharedArena()
    for value in (1.0, 2.0):
        data = np.full(6, value, dtype=np.float32).view(np.uint8)
        data.flags.writeable = False  # as it comes from an object store
        plain = as_plain(bucket_with(InlineBytes(data=(data,))), arena)
        with receive_tensors(PlainBucket(**plain).restore_bucket()) as tensors:
            assert compute_checksums(tensors) == {"a.weight": checksum(data)}
            assert torch.equal(tensors[0][1], torch.full((2, 3), value))
    arena.close()


@pytest.mark.parametrize(
    ("kind", "error"), [(ValueError, ValueError("x 'y'\nz")), (ConnectionError, ConnectionResetError("gone"))]
)
def test_an_error_comes_home_as_what_it_is_though_vllm_carries_words_alone(
    kind: type[Exception], error: Exception
) -> None:
    with pytest.raises(RuntimeError) as carried, encode_errors():
        raise error
    words = f"Worker failed with error '{carried.value}', please check the stack trace above"
    with pytest.raises(kind) as heard, decode_errors():
        raise Exception(words)
    assert str(heard.value) == str(error)
    with pytest.raises(KeyError), decode_errors():
        raise KeyError("not told")


def test_a_tensor_is_applied_where_one_worker_took_it_and_what_holds_it_changed() -> None:
    """Each of two workers has a half: only the second one's half of `v` changed, none of `o`; no worker took `w`."""
    first = Applied(taken=["q", "v", "o"], still=["v", "o"], moved=["q"])
    second = Applied(taken=["q", "v", "o", "e"], still=["q", "o"], moved=["v"])
    assert find_unapplied(["q", "v", "o", "e", "w"], [first, second]) == ("o", "w")


def test_receipt_of_vllm_uses_the_names_that_were_sent() -> None:
    own = Applied(taken=["embed", "norm"], still=["embed"], moved=[])
    told = under_sent_names(own, {"lm_head": "embed", "norm": "norm", "gone": "gone"})
    assert told == Applied(taken=["lm_head", "norm"], still=["lm_head"], moved=[])
