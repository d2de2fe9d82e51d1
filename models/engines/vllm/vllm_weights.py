"""Buckets and errors in the plain forms that cross to vLLM's worker and back. Needs neither vLLM nor a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import msgspec

from models.arena import room_for, views
from models.types import SharedMemory, SmallPayload, WeightBucket, WeightTensor
from models.weights.receiving import received
from models.weights.weight_files import SharedArena

ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "ConnectionError": ConnectionError}
TOLD = re.compile(r"<<(\w+)>>(.*)<<end>>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBucket:
    """A bucket of numbers, strings and bytes: what msgpack carries."""

    tensors: list[dict[str, Any]]
    payload: dict[str, Any]

    def restored(self) -> WeightBucket:
        return WeightBucket(
            tensors=msgspec.convert(self.tensors, tuple[WeightTensor, ...]),
            payload=msgspec.convert(self.payload, SmallPayload),
        )


def as_plain(bucket: WeightBucket, arena: SharedArena) -> dict[str, Any]:
    """For PlainBucket. What isn't told in a few words, as bytes that come inline, is received here and copied to
    `arena`, where it lies until the next bucket's."""
    payload = bucket.payload if isinstance(bucket.payload, SmallPayload) else _in_shared_memory(bucket, arena)
    plain = {"tensors": bucket.tensors, "payload": payload}
    return cast(dict[str, Any], msgspec.to_builtins(plain, builtin_types=(bytes,)))


def _in_shared_memory(bucket: WeightBucket, arena: SharedArena) -> SharedMemory:
    with received(bucket) as tensors:
        dtypes, shapes = [tensor.dtype for _, tensor in tensors], [tensor.shape for _, tensor in tensors]
        room = views(arena.reserve(room_for(dtypes, shapes)), dtypes, shapes)
        for target, (_, source) in zip(room, tensors, strict=True):
            target.copy_(source)
    return SharedMemory(path=arena.path)


class Applied(TypedDict):
    """What one worker saw of a push, as it crosses to the engine's process.

    taken: tensors that went into a parameter of this worker.
    still: of these, the ones that changed since the last push and all of whose parameters did not.
    moved: the ones of whose parameters one changed.
    """

    taken: list[str]
    still: list[str]
    moved: list[str]


def under_sent_names(applied: Applied, own_names: Mapping[str, str]) -> Applied:
    """The same by the names that tensors came under: sent name -> the name that vLLM knows it by."""

    def sent(names: Iterable[str]) -> list[str]:
        known = set(names)
        return [name for name, own in own_names.items() if own in known]

    return Applied(taken=sent(applied["taken"]), still=sent(applied["still"]), moved=sent(applied["moved"]))


def unapplied(sent: Iterable[str], workers: Iterable[Applied]) -> tuple[str, ...]:
    """Tensors that no worker took, or that changed while what holds them changed in none: each holds a part."""
    seen = list(workers)
    taken, still, moved = (set().union(*(w[key] for w in seen)) for key in ("taken", "still", "moved"))
    return tuple(sorted((set(sent) - taken) | (still - moved)))


@contextmanager
def writing_error() -> Iterator[None]:
    """In the worker. Of an error vLLM brings home the words alone: they tell its kind as well."""
    try:
        yield
    except tuple(ERRORS.values()) as error:
        kind = next(name for name, kind in ERRORS.items() if isinstance(error, kind))
        raise RuntimeError(f"<<{kind}>>{error}<<end>>") from error


@contextmanager
def reading_error() -> Iterator[None]:
    """At home: raises the error that a worker told of."""
    try:
        yield
    except Exception as error:
        if told := TOLD.search(str(error)):
            raise ERRORS[told[1]](told[2]) from error
        raise
