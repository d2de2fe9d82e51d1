"""A push of weights: stream, confirm version and checksums, probe, resume. Knows neither tensors nor processes.

    pause all -> for each bucket: to all engines at once -> commit -> compare receipts -> compare a probe -> resume

Every step of every engine stands under one deadline. A push that fails leaves its engines paused, on weights that
nobody may sample from; a later push starts over and needs no restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from models.types import Engine, EngineDied, WeightBucket, WeightReceipt
from scheduler.supervise import run_together
from scheduler.transport import TRANSPORTS

T = TypeVar("T")
HASH_SLICE_BYTES = 16 << 20  # hashed at one go: the event loop breathes in between


@dataclass(frozen=True)
class SyncConfig:
    """How weights travel, how long a push may take, how close the engines must come to the learner on the probe."""

    transport: str = "auto"  # one of TRANSPORTS; auto: by where learner and engines are
    bucket_mb: int = 64  # of weights that travel at once; two such buckets are held at most
    delta: bool = False  # send only the buckets that changed since an engine's last receipt, by checksum
    deadline_s: float = 60.0
    probe_tokens: int = 64
    probe_tolerance: float = 1e-3  # in nats per token, where float32 was sent
    probe_tolerance_16bit: float = 0.25  # where bfloat16 or float16 was sent: the learner scores in its own precision

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport: unknown transport {self.transport!r}; known: {', '.join(TRANSPORTS)}")
        if self.bucket_mb < 1:
            raise ValueError(f"bucket_mb: must be at least 1, got {self.bucket_mb}")
        if self.probe_tokens < 2:
            raise ValueError(
                f"probe_tokens: must be at least 2 (the first token has no log-prob), got {self.probe_tokens}"
            )
        for key in ("deadline_s", "probe_tolerance", "probe_tolerance_16bit"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}: must be above 0, got {getattr(self, key)}")


class WeightSource(Protocol):
    """The sender: a learner, or whatever stands for it."""

    def buckets(self) -> AsyncIterator[WeightBucket]:
        """All tensors of the model once, in any order."""
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs of all tokens but the first under the weights that `buckets` sends."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """A push that succeeded. `probe_error` is the largest difference of a log-prob over all engines, in nats."""

    version: int
    seconds: float
    pause_seconds: float
    num_bytes: int
    probe_error: float


class WeightMismatch(Exception):
    """An engine has other weights than were sent. The run must stop."""


class WeightsNotFinite(ArithmeticError):
    """The learner itself scores the probe with nan or inf. Nothing was sent."""


class WeightSyncTimeout(Exception):
    """Somebody did not answer within the deadline."""


async def push(
    source: WeightSource,
    engines: Mapping[str, Engine],
    version: int,
    probe_ids: Sequence[int],
    config: SyncConfig,
) -> SyncReport:
    """Bring all engines to `version`. Raises WeightMismatch, WeightSyncTimeout or EngineDied, naming the engine."""
    sync = _Push(source, engines, version, probe_ids, config)
    try:
        async with asyncio.timeout(config.deadline_s):
            return await sync.run()
    except TimeoutError:
        raise WeightSyncTimeout(
            f"weights of version {version} did not arrive within {config.deadline_s:g} s; waiting for "
            + "; ".join(f"{who} {what}" for who, what in sync.waiting.items())
        ) from None


@dataclass(slots=True)
class _Push:
    """One push under way."""

    source: WeightSource
    engines: Mapping[str, Engine]
    version: int
    probe_ids: Sequence[int]
    config: SyncConfig
    waiting: dict[str, str] = field(default_factory=dict)  # who -> what it is doing
    checksums: dict[str, str] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    num_bytes: int = 0

    async def run(self) -> SyncReport:
        clock = asyncio.get_running_loop().time
        expected = await self._step("learner", "to score the probe", self.source.score(self.probe_ids))
        if not all(math.isfinite(logprob) for logprob in expected):
            raise WeightsNotFinite(
                f"the learner's log-probs are not finite at version {self.version}: training diverged; "
                "try a lower train.lr"
            )
        started_s = clock()
        await self._on_engines("to pause", lambda engine: engine.pause())
        paused_s = clock()
        await self._stream()
        receipts = await self._on_engines("to commit", lambda engine: engine.commit_weights(self.version))
        for name, receipt in receipts.items():
            self._compare(name, receipt)
        probe_error = await self._probe(expected)
        await self._on_engines("to resume", lambda engine: engine.resume())
        return SyncReport(
            version=self.version,
            seconds=clock() - started_s,
            pause_seconds=clock() - paused_s,
            num_bytes=self.num_bytes,
            probe_error=probe_error,
        )

    async def _stream(self) -> None:
        """Bucket by bucket, to all engines at once; what was sent is hashed meanwhile."""
        stream = aiter(self.source.buckets())
        for index in itertools.count():
            bucket = await self._step("learner", f"to send bucket {index}", anext(stream, None))
            if bucket is None:
                return
            names = f"{bucket.tensors[0].name} .. {bucket.tensors[-1].name}" if bucket.tensors else "empty"
            what = f"to load bucket {index} ({names})"
            loads = {name: self._step(name, what, engine.load_bucket(bucket)) for name, engine in self.engines.items()}
            await run_together(**loads, **{"the sender's hash": self._note(bucket)})

    async def _note(self, bucket: WeightBucket) -> None:
        for tensor in bucket.tensors:
            self.checksums[tensor.name] = await _checksum(tensor.data)
            self.dtypes.add(tensor.dtype)
            self.num_bytes += tensor.data.nbytes

    def _compare(self, name: str, receipt: WeightReceipt) -> None:
        """Was what was sent what arrived?"""
        if receipt.version != self.version:
            raise WeightMismatch(f"{name} says it has version {receipt.version}; version {self.version} was sent")
        for tensor in self.checksums.keys() | receipt.checksums.keys():
            sent, got = self.checksums.get(tensor, "nothing"), receipt.checksums.get(tensor, "nothing")
            if sent != got:
                raise WeightMismatch(f"{name} got {tensor} as {got}; sent was {sent} (blake2b-64)")

    async def _probe(self, expected: Sequence[float]) -> float:
        """Do the engines sample from what arrived? Returns the largest difference."""
        tolerance = self.config.probe_tolerance
        if self.dtypes - {"float32"}:
            tolerance = self.config.probe_tolerance_16bit
        answers = await self._on_engines("to score the probe", lambda engine: engine.score(self.probe_ids))
        worst = 0.0
        for name, logprobs in answers.items():
            # numpy's max: Python's own loses a nan that isn't first.
            error = float(np.abs(np.subtract(expected, logprobs)).max())
            if not error <= tolerance:  # true of nan
                raise WeightMismatch(
                    f"{name} holds version {self.version} by its checksums, but scores a probe {error:.2g} nats away "
                    f"from the learner (tolerance {tolerance:g}): its weights were not applied"
                )
            worst = max(worst, error)
        return worst

    async def _on_engines(self, what: str, ask: Callable[[Engine], Awaitable[T]]) -> dict[str, T]:
        """All engines at once; the first failure ends the step for all."""
        return await run_together(
            **{name: self._step(name, what, ask(engine)) for name, engine in self.engines.items()}
        )

    async def _step(self, who: str, what: str, work: Awaitable[T]) -> T:
        """Keep on record who is busy with what, for the timeout's message; an interrupted step stays on it."""
        self.waiting[who] = what
        try:
            result = await work
        except EngineDied as death:
            raise EngineDied(f"{who} died while it was asked {what}: {death}") from death
        del self.waiting[who]
        return result


async def _checksum(data: np.ndarray) -> str:
    """blake2b with 64 bits, in hex, as engines compute it."""
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, data.nbytes, HASH_SLICE_BYTES):
        digest.update(data.data[start : start + HASH_SLICE_BYTES])
        await asyncio.sleep(0)
    return digest.hexdigest()
