"""Buckets and errors in plain types, for sending to vLLM's worker and back."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import msgspec

from grmpipe.models.bucket_memory import room_for, views
from grmpipe.models.types import SharedMemory, SmallPayload, WeightBucket, WeightTensor
from grmpipe.models.weights.receive_tensors import receive_tensors
from grmpipe.models.weights.weight_files import SharedArena

ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "ConnectionError": ConnectionError}
REPORTED_ERROR = re.compile(r"<<(\w+)>>(.*)<<end>>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBucket:
    """A bucket of numbers, strings and bytes, which msgpack can send."""

    tensors: list[dict[str, Any]]
    payload: dict[str, Any]

    def restore_bucket(self) -> WeightBucket:
        return WeightBucket(
            tensors=msgspec.convert(self.tensors, tuple[WeightTensor, ...]),
            payload=msgspec.convert(self.payload, SmallPayload),
        )


def as_plain(bucket: WeightBucket, arena: SharedArena) -> dict[str, Any]:
    """The fields of a PlainBucket. A payload with inline bytes is received here and copied to `arena`, where it stays
    until the next bucket.
    """
    payload = bucket.payload if isinstance(bucket.payload, SmallPayload) else _in_shared_memory(bucket, arena)
    plain = {"tensors": bucket.tensors, "payload": payload}
    return cast(dict[str, Any], msgspec.to_builtins(plain, builtin_types=(bytes,)))


def _in_shared_memory(bucket: WeightBucket, arena: SharedArena) -> SharedMemory:
    with receive_tensors(bucket) as tensors:
        dtypes, shapes = [tensor.dtype for _, tensor in tensors], [tensor.shape for _, tensor in tensors]
        room = views(arena.reserve(room_for(dtypes, shapes)), dtypes, shapes)
        for target, (_, source) in zip(room, tensors, strict=True):
            target.copy_(source)
    return SharedMemory(path=arena.path)


class Applied(TypedDict):
    """One worker's report on a push, as it is sent to the engine's process.

    taken: tensors that went into a parameter of this worker.
    still: those of them that changed since the last push while none of their parameters did.
    moved: tensors with a parameter that changed.
    """

    taken: list[str]
    still: list[str]
    moved: list[str]


def under_sent_names(applied: Applied, own_names: Mapping[str, str]) -> Applied:
    """The same report by the names under which tensors were sent: sent name -> vLLM's name."""

    def sent(names: Iterable[str]) -> list[str]:
        known = set(names)
        return [name for name, own in own_names.items() if own in known]

    return Applied(taken=sent(applied["taken"]), still=sent(applied["still"]), moved=sent(applied["moved"]))


def find_unapplied(sent: Iterable[str], workers: Iterable[Applied]) -> tuple[str, ...]:
    """Tensors that no worker took, or that changed without a change of their parameters in any worker: each holds a
    part.
    """
    seen = list(workers)
    taken, still, moved = (set().union(*(w[key] for w in seen)) for key in ("taken", "still", "moved"))
    return tuple(sorted((set(sent) - taken) | (still - moved)))


@contextmanager
def encode_errors() -> Iterator[None]:
    """Context in the worker: vLLM returns only the message of an error, so the message gets the error's kind."""
    try:
        yield
    except tuple(ERRORS.values()) as error:
        kind = next(name for name, kind in ERRORS.items() if isinstance(error, kind))
        raise RuntimeError(f"<<{kind}>>{error}<<end>>") from error


@contextmanager
def decode_errors() -> Iterator[None]:
    """Context in the engine's process: raises the error that a worker reported."""
    try:
        yield
    except Exception as error:
        if reported := REPORTED_ERROR.search(str(error)):
            raise ERRORS[reported[1]](reported[2]) from error
        raise
