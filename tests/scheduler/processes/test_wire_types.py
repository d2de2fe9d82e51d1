"""What calls may send: plain data by the types of methods, arrays, weight buckets, errors by name; nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from grmpipe.models.types import (
    Broadcast,
    Completion,
    CudaHandle,
    CudaHandles,
    EngineDied,
    GroupLink,
    InlineBytes,
    ModelFiles,
    Payload,
    RequestContext,
    SafetensorsFile,
    SamplingParams,
    SharedMemory,
    VersionSpan,
    WeightBucket,
    WeightTensor,
)
from grmpipe.scheduler.processes.engine_host import (
    NOT_BY_SOCKET,
    Abort,
    Cancel,
    EngineHost,
    EngineRequest,
    Finished,
    FirstToken,
)
from grmpipe.scheduler.processes.wire_types import (
    KNOWN_ERRORS,
    Dialect,
    UntypedCall,
    args_type,
    decoder,
    encoder,
    rebuild_error,
    remote_error,
    types_of_call,
)

HANDLE = CudaHandle(
    memory=b"\x00\xff", storage_bytes=48, storage_offset_bytes=0, ref_counter=b"\x01", ref_counter_offset=3, event=b"",
    event_sync_required=True,
)  # fmt: skip


def crossed(value: object, type_: Any) -> Any:
    return decoder(type_).decode(encoder().encode(value))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
def test_an_array_crosses_with_its_type_shape_and_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    came = crossed(array, np.ndarray)
    assert (came.dtype, came.shape) == (array.dtype, array.shape)
    assert np.array_equal(came, array)
    if len(shape) == 3:
        assert np.array_equal(crossed(array.transpose(2, 0, 1), np.ndarray), array.transpose(2, 0, 1))


def test_an_array_of_objects_can_t_cross() -> None:
    with pytest.raises((KeyError, ValueError)):
        crossed(("|O", (1,), b"\0" * 8), np.ndarray)


@pytest.mark.parametrize(
    "payload",
    [
        SharedMemory(path="/dev/shm/x"),
        SafetensorsFile(path="/shared/x"),
        Broadcast(),
        ModelFiles(path="/models/x"),
        CudaHandles(handles={"uuid": HANDLE}),
    ],
)
def test_a_bucket_crosses_with_its_payload(payload: Payload) -> None:
    tensor = WeightTensor(name="a.weight", dtype="float32", shape=(2, 3), checksum="c")
    bucket = WeightBucket(tensors=(tensor,), payload=payload)
    assert crossed(bucket, WeightBucket) == bucket


def test_a_bucket_that_holds_bytes_crosses_with_them() -> None:
    data = np.arange(7, dtype=np.uint8)
    came = crossed(WeightBucket(tensors=(), payload=InlineBytes(data=(data,))), WeightBucket | None)
    assert np.array_equal(came.payload.data[0], data)


def test_a_payload_that_this_process_knows_nothing_of_is_refused() -> None:
    with pytest.raises((KeyError, ValueError)):
        crossed({"tensors": [], "payload": {"type": "Popen", "args": "true"}}, WeightBucket)


def test_messages_to_an_engine_and_from_it_cross_as_themselves() -> None:
    calls = Dialect.of(EngineHost, but=NOT_BY_SOCKET).calls
    request = EngineRequest(
        ticket=3, prompt_ids=(1, 2), params=SamplingParams(max_new_tokens=8, stop=("x",)),
        context=RequestContext(request_id="r", group_id="g", role="policy", deadline_s=1.5),
    )  # fmt: skip
    messages = [request, Cancel(ticket=4), Abort(request_id="r")]
    args = msgspec.structs.astuple(crossed((messages,), args_type(calls["deliver"])))
    assert args == (messages,)
    completion = Completion(
        token_ids=(5, 6), logprobs=(-0.1, -2.0), text="é", finish_reason="stop",
        versions=(VersionSpan(model="policy", version=1, start=0, end=2),),
        experts_TLK=np.arange(8, dtype=np.int16).reshape(2, 2, 2),
    )  # fmt: skip
    notices = [FirstToken(ticket=3), Finished(ticket=3, completion=completion)]
    came = crossed(notices, calls["collect"].answer)
    assert came == notices
    assert np.array_equal(came[1].completion.experts_TLK, completion.experts_TLK)
    link = GroupLink(name="w", backend="gloo", address="::1", port=1, rank=0, world_size=2, timeout_s=3.0)
    came_link, _ = msgspec.structs.astuple(crossed((link,), args_type(calls["begin_weights"])))
    assert came_link == link


class TornBatch(ArithmeticError):
    def __init__(self, norm: float, key: str, group_ids: tuple[str, ...] = ()) -> None:
        super().__init__(norm, key, group_ids)
        self.norm, self.group_ids = norm, group_ids


class Rank:
    own_errors: ClassVar = (TornBatch,)

    def step(self, scale: float = 1.0) -> dict[str, float]:
        return {"loss": scale}


class Train:
    components: ClassVar = {"rank": Rank}

    def stop(self) -> None: ...


def test_methods_of_a_component_are_called_by_its_name_and_their_own() -> None:
    calls = Dialect.of(Train).calls
    assert calls == {"stop": types_of_call(Train.stop), "rank.step": types_of_call(Rank.step)}


def test_errors_arrive_as_themselves_as_the_nearest_known_kind_or_as_a_traceback() -> None:
    known = Dialect.of(Rank).errors
    torn = rebuild_error(remote_error(TornBatch(float("inf"), "train.lr", ("g1",)), known), known)
    assert isinstance(torn, TornBatch) and torn.norm == float("inf") and torn.group_ids == ("g1",)
    died = rebuild_error(remote_error(EngineDied("gone"), KNOWN_ERRORS), KNOWN_ERRORS)
    assert type(died) is EngineDied and str(died) == "gone"
    decoding = rebuild_error(remote_error(UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), KNOWN_ERRORS), KNOWN_ERRORS)
    assert type(decoding) is ValueError and "can't decode" in str(decoding)
    strange = rebuild_error(remote_error(pickle.PicklingError("odd"), KNOWN_ERRORS), KNOWN_ERRORS)
    assert type(strange) is RuntimeError and "PicklingError: odd" in str(strange)


def test_parameters_that_an_actor_class_adds_are_no_arguments_of_a_method() -> None:
    def method(self: object, number: int, *, trace: object = None) -> int: ...  # type: ignore[empty-body]

    assert [name for name, _, _ in types_of_call(method).args] == ["number"]


def test_arguments_with_a_default_may_be_left_out() -> None:
    types = args_type(types_of_call(Rank.step))
    assert [msgspec.structs.astuple(crossed(args, types)) for args in ((), (2.0,))] == [(1.0,), (2.0,)]


@dataclass(frozen=True)
class Wrapped:
    inner: object


@pytest.mark.parametrize("type_", [Any, object, Callable[[], int], Wrapped, list[object], dict[str, Any], Rank])
def test_a_method_whose_types_are_no_plain_data_can_t_be_called_by_a_socket(type_: Any) -> None:
    def method(self: object, value: Sequence[int]) -> None: ...

    method.__annotations__ = {"value": type_, "return": None}
    with pytest.raises(UntypedCall, match="method"):
        types_of_call(method)
