"""A push proves itself or says who failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from models.engines.simulated import Script, SimulatedEngine
from models.types import (
    Completion,
    EngineDied,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightReceipt,
    WeightTensor,
)
from scheduler.weight_sync import SyncConfig, SyncReport, WeightMismatch, WeightSyncTimeout, push

PROBE = (5, 6, 7, 8)


def tensor(name: str, dtype: str = "float32") -> WeightTensor:
    data = np.frombuffer(name.encode() * 16, dtype=np.uint8)
    return WeightTensor(name=name, dtype=dtype, shape=(data.size // 4,), data=data)


class Source:
    """Three buckets; scores every token -1, as the scripted engines do."""

    def __init__(self, dtype: str = "float32", hangs_at: int | None = None) -> None:
        self._dtype = dtype
        self._hangs_at = hangs_at

    async def buckets(self) -> AsyncIterator[WeightBucket]:
        for index in range(3):
            if index == self._hangs_at:
                await asyncio.Event().wait()
            names = (f"layers.{index}.q", f"layers.{index}.k")
            yield WeightBucket(tensors=tuple(tensor(name, self._dtype) for name in names))

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return (-1.0,) * (len(token_ids) - 1)


class Faulty(SimulatedEngine):
    """Goes wrong once, in the way of its name; then it is as good as any."""

    def __init__(self, fault: str = "") -> None:
        super().__init__("policy", lambda ids, params, context: Script(token_ids=(1,), text="x"))
        self.fault = fault
        self.resumed = 0

    def _goes_wrong(self, fault: str) -> bool:
        wrong = self.fault == fault
        if wrong:
            self.fault = ""
        return wrong

    async def load_bucket(self, bucket: WeightBucket) -> None:
        if bucket.tensors[0].name == "layers.1.q":
            if self._goes_wrong("hang"):
                await asyncio.Event().wait()
            if self._goes_wrong("die"):
                raise EngineDied("killed by signal 9")
            if self._goes_wrong("bit"):
                first, *rest = bucket.tensors
                damaged = first.data.copy()
                damaged[3] ^= 1
                flipped = WeightTensor(name=first.name, dtype=first.dtype, shape=first.shape, data=damaged)
                bucket = WeightBucket(tensors=(flipped, *rest))
            if self._goes_wrong("lost"):
                bucket = WeightBucket(tensors=bucket.tensors[1:])
        await super().load_bucket(bucket)

    async def commit_weights(self, version: int) -> WeightReceipt:
        return await super().commit_weights(version - 1 if self._goes_wrong("version") else version)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        logprobs = await super().score(token_ids)
        for fault, error in (("stale", 0.8), ("drift", 0.01), ("nan", float("nan"))):
            if self._goes_wrong(fault):
                return (*logprobs[:-1], logprobs[-1] + error)
        return logprobs

    async def resume(self) -> None:
        self.resumed += 1
        await super().resume()


async def push_to(*engines: Faulty, source: Source | None = None, deadline_s: float = 5.0) -> SyncReport:
    named = {f"policy-{index}": engine for index, engine in enumerate(engines)}
    return await push(source or Source(), named, 3, PROBE, SyncConfig(deadline_s=deadline_s))


def test_a_push_reports_what_it_moved_and_resumes_all() -> None:
    async def main() -> None:
        engines = Faulty(), Faulty()
        report = await push_to(*engines)
        assert report.version == 3
        assert report.num_bytes == 6 * 16 * len("layers.0.q")
        assert report.probe_error == 0
        assert 0 < report.pause_seconds <= report.seconds
        assert [engine.version for engine in engines] == [3, 3]
        assert [engine.resumed for engine in engines] == [1, 1]

    asyncio.run(main())


def test_requests_in_flight_go_on_under_the_new_weights() -> None:
    async def main() -> Completion:
        engine = SimulatedEngine(
            "policy", lambda ids, params, context: Script(token_ids=(1,) * 20, text="x"), tokens_per_s=200
        )
        context = RequestContext(request_id="r", group_id="g", role="policy")
        answer = asyncio.create_task(engine.generate((1,), SamplingParams(max_new_tokens=20), context))
        await asyncio.sleep(0.03)
        await push(Source(), {"policy-0": engine}, 3, PROBE, SyncConfig())
        return await answer

    completion = asyncio.run(main())
    assert len(completion.token_ids) == 20
    assert [span.version for span in completion.versions] == [0, 3]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("bit", r"policy-1 got layers\.1\.q as \w{16}; sent was \w{16}"),
        ("lost", r"policy-1 got layers\.1\.q as nothing"),
        ("version", "policy-1 says it has version 2; version 3 was sent"),
        ("stale", r"policy-1 holds version 3 by its checksums, but scores a probe 0\.8 nats away"),
        ("drift", r"policy-1 .* 0\.01 nats away .* \(tolerance 0\.001\)"),
        ("nan", "policy-1 .* nan nats away"),
    ],
)
def test_a_mismatch_names_the_engine_and_leaves_all_paused_until_a_push_succeeds(fault: str, words: str) -> None:
    async def main() -> None:
        engines = Faulty(), Faulty(fault)
        with pytest.raises(WeightMismatch, match=words):
            await push_to(*engines)
        assert [engine.resumed for engine in engines] == [0, 0]
        await push_to(*engines)
        assert [engine.resumed for engine in engines] == [1, 1]

    asyncio.run(main())


def test_sixteen_bit_weights_get_the_wider_tolerance() -> None:
    report = asyncio.run(push_to(Faulty("drift"), source=Source("bfloat16")))
    assert report.probe_error == pytest.approx(0.01)
    with pytest.raises(WeightMismatch):
        asyncio.run(push_to(Faulty("stale"), source=Source("bfloat16")))


def test_an_engine_that_hangs_is_named_with_its_tensors_and_needs_no_restart() -> None:
    async def main() -> None:
        engines = Faulty(), Faulty("hang")
        with pytest.raises(
            WeightSyncTimeout, match=r"waiting for policy-1 to load bucket 1 \(layers\.1\.q \.\. layers\.1\.k\)$"
        ):
            await push_to(*engines, deadline_s=0.1)
        assert (await push_to(*engines)).version == 3

    asyncio.run(main())


def test_a_learner_that_hangs_is_named_too() -> None:
    with pytest.raises(WeightSyncTimeout, match=r"waiting for learner to send bucket 2$"):
        asyncio.run(push_to(Faulty(), source=Source(hangs_at=2), deadline_s=0.1))


def test_an_engine_that_dies_ends_the_push_as_itself() -> None:
    with pytest.raises(EngineDied, match=r"policy-0 died while it was asked to load bucket 1 .*: killed by signal 9"):
        asyncio.run(push_to(Faulty("die"), Faulty()))


@pytest.mark.parametrize("key", ["deadline_s", "probe_tokens", "probe_tolerance", "probe_tolerance_16bit"])
def test_a_bad_value_names_its_key(key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        SyncConfig(**{key: 0})
