"""One push of weights to some engines: stream, confirm, probe.

    pause all
    -> broadcasts: one call to each engine and rank, which join a group, send and load all buckets, and commit
       else:       begin; bucket by bucket, all engines load one while the learner makes the next; commit
    -> compare receipts -> resume -> compare a probe

One deadline covers every step of every engine; it grows with the bytes sent. A failed push leaves its engines paused,
on weights that must not be sampled from; a later push starts over and needs no restart.
"""

import asyncio
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from grmpipe.models.bounds import Bounded, above, at_least
from grmpipe.models.types import (
    MIN_BYTES_PER_S,
    Engine,
    EngineDied,
    GroupLink,
    WeightBucket,
    WeightDelta,
    WeightPush,
    WeightReceipt,
    WeightTensor,
)
from grmpipe.scheduler.processes.engine_host import Headers, encode_headers, receive_weights
from grmpipe.scheduler.processes.remote_engine import RemoteEngine
from grmpipe.scheduler.run_together import run_together

T = TypeVar("T")
LEARNER = "learner"
JOIN_S = 120.0  # limit for a new process group of broadcasts to connect
# [nats] Tolerances of the probe, by what is sent and how the engine keeps it.
TOLERANCE, TOLERANCE_16BIT, TOLERANCE_QUANTIZED = 1e-3, 0.25, 1.0


@dataclass(frozen=True)
class SyncConfig(Bounded):
    """How weights reach the engines, how long a push may take, and how close engines must be to the learner on the
    probe: a few tokens that both score after each push.
    """

    # How weights are sent: a transport, or the dotted path of your own; auto: by where learner and engines are.
    transport: str = "auto"
    # Weights sent at once; at most two such buckets are held. 0: by the size of the model.
    bucket_mb: int = at_least(0, 0, "0 (by the model's size) or more")
    # Send 16-bit weights as what changed in them since the last push, a few percent of the bytes at the usual rates of
    # RL, by a transport over a network or a shared folder (object_store, disk). The learner and each engine keep a copy
    # of the weights in host memory.
    delta: bool = False
    # Limit of a push, besides the time for its bytes (at 100 MB/s) and for a new process group.
    deadline_s: float = above(0, 60.0)
    # [nats] Largest median difference of log-probs over the likelier half of the probe; null: 0.001 if float32 is sent,
    # 0.25 if bfloat16 or float16 is, 1 if the engine's options quantize its weights or cache.
    probe_tolerance: float | None = above(0, None)

    def tolerance(self, dtypes: Collection[str]) -> float:
        """The tolerance for weights that are sent in these types."""
        return self.probe_tolerance or (TOLERANCE if set(dtypes) <= {"float32"} else TOLERANCE_16BIT)


class WeightSource(Protocol):
    """The sender: a learner, or its substitute. All methods but `held` are called within a hold, in this order."""

    def held(self) -> AbstractAsyncContextManager[int]:
        """Context in which the weights don't change: no optimizer step, no load; gradients may still accumulate. Yields
        the number of optimizer steps so far.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs of all tokens but the first, with the weights that are sent."""
        ...

    async def connect(self, link: GroupLink | None) -> None:
        """Join the group of broadcasts as rank 0; None: there is none. A group joined before is kept."""
        ...

    async def num_buckets(self) -> int: ...

    async def num_fixed_buckets(self) -> int:
        """The number of leading buckets that never change: an engine that has them isn't sent them again."""
        ...

    async def bucket(self, index: int) -> WeightBucket:
        """The bucket at an index; called in order, bucket 1 while bucket 0 is loaded. The memory of bucket i may be
        reused once bucket i + 2 is called for, or the hold ends.
        """
        ...


@runtime_checkable
class BroadcastSource(WeightSource, Protocol):
    """A sender that can broadcast: all buckets of a push by itself."""

    async def list_tensors(self) -> Headers:
        """The tensors of each bucket, without checksums."""
        ...

    async def broadcast(self, first: int, version: int) -> Mapping[str, str]:
        """Broadcast the buckets from `first` on, in order, while the engines load them. Returns the checksums by
        name.
        """
        ...


@runtime_checkable
class DeltaSource(WeightSource, Protocol):
    """A sender that can send what changed since the last push."""

    async def send_changes(self, wanted: bool) -> None:
        """Whether the buckets of this push hold what changed in them, or all their bytes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """A successful push. `probe_error`: the largest over all engines, in nats (see the function `probe_error`)."""

    version: int
    seconds: float
    pause_seconds: float
    num_bytes: int  # sent in the buckets for at least one engine; each counts once
    probe_error: float
    weight_bytes: int = 0  # of the weights in them: more than were sent if only changes were
    transport: str = "object_store"


class WeightSyncTimeout(Exception):
    """A participant did not answer within the deadline. `waiting_for`: their names."""

    def __init__(self, message: str, waiting_for: frozenset[str]) -> None:
        super().__init__(message)
        self.waiting_for = waiting_for


class EngineLost(EngineDied):
    """An engine died during a push."""

    def __init__(self, name: str, engine: Engine, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.engine = engine


@dataclass(slots=True)
class Push:
    """One push in progress."""

    source: WeightSource
    engines: Mapping[str, Engine]
    version: int
    probe_ids: Sequence[int]
    config: SyncConfig
    have_fixed: frozenset[str]  # engines that have the buckets that never change
    all_have_last: bool = False  # all engines have the last push, and the sender's last buckets are those
    last_error: float | None = None  # probe error of the last push
    sent: dict[str, dict[str, str]] = field(init=False)
    waiting: list[tuple[str, str]] = field(default_factory=list)  # (who, what) of work in progress
    dtypes: set[str] = field(default_factory=set)
    num_bytes: int = 0  # sent
    weight_bytes: int = 0
    allowed_s: float = field(init=False)
    _limit: asyncio.Timeout | None = None

    def __post_init__(self) -> None:
        self.sent = {name: {} for name in self.engines}
        self.allowed_s = self.config.deadline_s

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.allowed_s) as limit:
                self._limit = limit
                yield
        except TimeoutError:
            if not limit.expired():  # a limit within a step, not the push's
                raise
            raise WeightSyncTimeout(
                f"weights of version {self.version} did not arrive within {self.allowed_s:g} s; waiting for "
                + "; ".join(f"{who} {what}" for who, what in self.waiting),
                frozenset(who for who, _ in self.waiting),
            ) from None

    def allow(self, seconds: float) -> None:
        """Extend the deadline by `seconds`, for work that it isn't meant for."""
        self.allowed_s += seconds
        if self._limit is not None and (ends := self._limit.when()) is not None:
            self._limit.reschedule(ends + seconds)

    def allow_at_most(self, seconds: float) -> None:
        """Bring the deadline forward to `seconds` from now, if it is later."""
        if self._limit is not None and (ends := self._limit.when()) is not None:
            early_s = ends - (asyncio.get_running_loop().time() + seconds)
            if early_s > 0:
                self.allow(-early_s)

    async def run(self, link: GroupLink | None, ranks_per_engine: int, transport: str) -> SyncReport:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        # Before the pause: the learner's pass over the probe keeps no engine from sampling, and weights that aren't
        # finite never reach one.
        expected = await self.step(LEARNER, "to score the probe", self.source.score(self.probe_ids))
        check_finite(expected, self.version)
        await self._on_engines("to pause", lambda engine: engine.pause())
        paused_s = clock()
        if link is None:
            await self._begin()
            await self._stream()
            receipts = await self._on_engines("to commit", lambda engine: engine.commit_weights(self.version))
        else:
            receipts = await self._broadcast(link, ranks_per_engine)
        # Receipts are compared while all engines are paused: weights that arrived damaged are never sampled from.
        for name, receipt in receipts.items():
            check_receipt(name, self.version, self.sent[name], receipt)
        await self._on_engines("to resume", lambda engine: engine.resume())
        resumed_s = clock()
        # After the resume: kept requests go on while the probe is scored. A mismatch pauses the engines again.
        probe_error = await self._probe(expected)
        return SyncReport(
            version=self.version,
            seconds=clock() - started_s,
            pause_seconds=resumed_s - paused_s,
            num_bytes=self.num_bytes,
            weight_bytes=self.weight_bytes,
            probe_error=probe_error,
            transport=transport,
        )

    async def step(self, who: str, what: str, work: Awaitable[T]) -> T:
        """Run a step of the push, recorded for the timeout's message; an interrupted step stays recorded."""
        self.waiting.append((who, what))
        try:
            result = await work
        except EngineDied as death:
            raise EngineLost(who, self.engines[who], f"{who} died while it was asked {what}: {death}") from death
        self.waiting.remove((who, what))
        return result

    async def _broadcast(self, link: GroupLink, ranks_per_engine: int) -> dict[str, WeightReceipt]:
        """One call to each engine, which ends with its receipt, and one to each rank of the learner: the members of the
        group pace each other, and no bucket waits for this process.
        """
        source = self.source
        assert isinstance(source, BroadcastSource), "a group of broadcasts has a sender that knows them"
        buckets = await self.step(LEARNER, "to list its tensors", source.list_tensors())
        first, _ = await self._first_bucket()
        tensors = [tensor for bucket in buckets[first:] for tensor in bucket]
        size = self._count(tensors)
        self.num_bytes += size
        self.allow(size / MIN_BYTES_PER_S)
        push = WeightPush(version=self.version, link=link, headers=encode_headers(buckets[first:]))
        work: dict[str, Coroutine[object, object, WeightReceipt | None]] = {}
        for place, (name, engine) in enumerate(self.engines.items()):
            # Joining waits for all members: the engines and the sender join at the same time.
            own = replace(push, link=replace(link, rank=1 + place * ranks_per_engine))
            work[name] = self.step(name, f"to receive {len(buckets) - first} buckets", _give(engine, own))
        last = sum(map(num_bytes, buckets[-1])) if buckets else 0
        work[LEARNER] = self._send(source, link, first, last)
        answers = await run_together(**work)
        return {name: receipt for name, receipt in answers.items() if receipt is not None}

    async def _send(self, source: BroadcastSource, link: GroupLink, first: int, last_bytes: int) -> None:
        await self.step(LEARNER, "to begin", source.connect(link))
        checksums = await self.step(LEARNER, "to broadcast its weights", source.broadcast(first, self.version))
        self.sent = {name: dict(checksums) for name in self.engines}
        # All that is left is to load the last bucket: an engine that hangs needn't get the time of all of them.
        self.allow_at_most(self.config.deadline_s + last_bytes / MIN_BYTES_PER_S)

    async def _begin(self) -> None:
        begins = {name: self.step(name, "to begin", engine.begin_weights()) for name, engine in self.engines.items()}
        await run_together(**begins, learner=self.step(LEARNER, "to begin", self.source.connect(None)))

    async def _first_bucket(self) -> tuple[int, int]:
        """The first bucket to send, and the number of those that never change. Frozen weights below adapters are sent
        once to each engine; one new engine is enough to make them again.
        """
        num_fixed = await self.step(LEARNER, "to count its fixed buckets", self.source.num_fixed_buckets())
        return num_fixed if self.have_fixed >= self.engines.keys() else 0, num_fixed

    async def _stream(self) -> None:
        """All engines load a bucket while the learner makes the next one: at most two are held."""
        if self.config.delta and isinstance(self.source, DeltaSource):
            await self.step(LEARNER, "to choose what it sends", self.source.send_changes(self.all_have_last))
        number = await self.step(LEARNER, "to count its buckets", self.source.num_buckets())
        first, num_fixed = await self._first_bucket()
        # Where unsharding and sending cost alike, one after the other took 1.4 to 1.5 times as long.
        bucket = await self._bucket(first) if first < number else None
        for index in range(first, number):
            assert bucket is not None
            work = self._moves(index, bucket, self.have_fixed if index < num_fixed else frozenset())
            if index + 1 < number:
                work["the next bucket"] = self._bucket(index + 1)
            answers = await run_together(**work)
            bucket = cast(WeightBucket | None, answers.get("the next bucket"))

    async def _bucket(self, index: int) -> WeightBucket:
        return await self.step(LEARNER, f"to send bucket {index}", self.source.bucket(index))

    def _moves(
        self, index: int, bucket: WeightBucket, have_it: Set[str]
    ) -> dict[str, Coroutine[object, object, object]]:
        """The transfers of a bucket to the engines that lack it."""
        checksums = {tensor.name: tensor.checksum for tensor in bucket.tensors}
        takers = [name for name in self.engines if name not in have_it]
        for name in takers:
            self.sent[name] |= checksums
        size = self._count(bucket.tensors)
        delta = bucket.payload if isinstance(bucket.payload, WeightDelta) else None
        self.num_bytes += size if delta is None else sum(map(num_bytes, delta.packed.tensors))
        self.allow(size * len(takers) / MIN_BYTES_PER_S)  # copies to engines share the learner's links
        what = f"to load bucket {index} ({describe_span(bucket)})"
        return {name: self.step(name, what, self.engines[name].load_bucket(bucket)) for name in takers}

    def _count(self, tensors: Sequence[WeightTensor]) -> int:
        """Count the tensors of a bucket. Returns their bytes."""
        size = sum(map(num_bytes, tensors))
        self.dtypes |= {tensor.dtype for tensor in tensors}
        self.weight_bytes += size
        return size

    async def _probe(self, expected: Sequence[float]) -> float:
        """The largest probe error over all engines; of weights that nobody has scored, from the first one. On a
        mismatch they are paused again: their weights must not be sampled from.
        """
        tolerance = probe_bound(self.config.tolerance(self.dtypes), self.last_error)
        scores = await self._on_engines("to score the probe", lambda engine: engine.score(self.probe_ids))
        expected = expected or next(iter(scores.values()))
        try:
            return max(check_probe(name, self.version, expected, scored, tolerance) for name, scored in scores.items())
        except WeightMismatch:
            with suppress(EngineDied):
                await self._on_engines("to pause", lambda engine: engine.pause())
            raise

    async def _on_engines(self, what: str, ask: Callable[[Engine], Awaitable[T]]) -> dict[str, T]:
        """Run a step on all engines at once; the first failure ends it for all."""
        return await run_together(**{name: self.step(name, what, ask(engine)) for name, engine in self.engines.items()})


def _give(engine: Engine, push: WeightPush) -> Awaitable[WeightReceipt]:
    """A whole push to an engine: by one call, if it is in another process."""
    if isinstance(engine, RemoteEngine):
        return engine.receive_weights(push)
    return receive_weights(engine, push, lambda: True)


# -- what proves a push: receipts against what was sent, log-probs against the learner's -------------------------------


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
LAYERS_SHOWN = 4
PROBE_FLOOR = 0.05  # in nats: an error below it may grow by any factor
NOISE_FACTOR = 10.0  # by which an error above it may grow from push to push


class WeightMismatch(Exception):
    """An engine has other weights than were sent. The run must stop."""


class WeightsNotFinite(ArithmeticError):
    """The learner itself scores the probe with nan or inf. Nothing was sent."""


def check_finite(logprobs: Sequence[float], version: int) -> None:
    if not all(map(math.isfinite, logprobs)):
        raise WeightsNotFinite(
            f"the learner's log-probs are not finite at version {version}: training diverged; try a lower train.lr"
        )


def check_receipt(engine: str, version: int, sent: Mapping[str, str], receipt: WeightReceipt) -> None:
    """Check that what was sent (name -> checksum) arrived, and that the engine has it now. An empty checksum isn't
    checked: the probe replaces it. Raises WeightMismatch.
    """
    if receipt.version != version:
        raise WeightMismatch(f"{engine} reports version {receipt.version}; version {version} was sent")
    got = receipt.checksums
    wrong = sorted(name for name in sent.keys() | got.keys() if not _agree(sent.get(name), got.get(name)))
    if wrong:
        first = wrong[0]
        raise WeightMismatch(
            f"{engine} received other weights than version {version} in {describe_tensors(wrong)}: "
            f"{first} arrived as {_checksum_text(got.get(first))}, {_checksum_text(sent.get(first))} was sent (xxh3-64)"
        )
    if receipt.unapplied:
        raise WeightMismatch(
            f"{engine} received version {version} but has not applied it in "
            f"{describe_tensors(sorted(receipt.unapplied))}: its parameters don't show these tensors; "
            "report this with the output of task=doctor"
        )


def check_probe(
    engine: str, version: int, expected: Sequence[float], scored: Sequence[float], tolerance: float
) -> float:
    """Check that the engine samples from these weights. Returns the error in nats. Raises WeightMismatch."""
    error = probe_error(expected, scored)
    if not error <= tolerance:  # also true for nan
        raise WeightMismatch(
            f"{engine} received version {version}, but its score of the probe differs by {error:.2g} nats from the "
            f"learner's (median of the likelier tokens; tolerance {tolerance:g}): its weights were not applied"
        )
    return error


def probe_error(expected: Sequence[float], scored: Sequence[float]) -> float:
    """The median difference over the likelier half of the tokens, which the policy could have sampled.

    For an unlikely token, two correct implementations in 16 bits may differ by tenths of a nat; other weights differ
    everywhere. Any nan makes the result nan.
    """
    errors_T = np.abs(np.subtract(expected, scored))
    if np.isnan(errors_T).any():
        return math.nan
    likelier = np.argsort(np.negative(expected), kind="stable")[: max(1, math.ceil(len(errors_T) / 2))]
    return float(np.median(errors_T[likelier]))


def probe_bound(tolerance: float, last_error: float | None) -> float:
    """The allowed error: the tolerance or, after a good push, NOISE_FACTOR times its error if that is less. That
    error is the noise between the two implementations, and grows only slowly while a policy sharpens.
    """
    return tolerance if last_error is None else min(tolerance, max(PROBE_FLOOR, NOISE_FACTOR * last_error))


def describe_tensors(names: Collection[str]) -> str:
    """Names of tensors in short: all of one layer as `model.layers.3.*`, a single one by its name."""
    counts = Counter(_layer_of(name) for name in names)
    layers = [next(n for n in names if _layer_of(n) == layer) if count == 1 else f"{layer}.* ({count} tensors)"
              for layer, count in counts.items()]  # fmt: skip
    more = f" and {len(layers) - LAYERS_SHOWN} more layers" if len(layers) > LAYERS_SHOWN else ""
    return ", ".join(layers[:LAYERS_SHOWN]) + more


def describe_span(bucket: WeightBucket) -> str:
    """The tensors of a bucket, for a message."""
    names = [tensor.name for tensor in bucket.tensors]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}" if names else "empty"


def num_bytes(tensor: WeightTensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def _agree(sent: str | None, got: str | None) -> bool:
    if sent is None or got is None:
        return False  # too few or too many tensors
    return sent == got or not sent or not got


def _checksum_text(checksum: str | None) -> str:
    return "nothing" if checksum is None else checksum or "something unhashed"


def _layer_of(name: str) -> str:
    """The layer of a tensor: its name up to the layer's number, or up to its siblings outside of layers."""
    layer = re.match(r".*?\.\d+(?=\.)", name)
    return layer[0] if layer else name.rpartition(".")[0] or name
