"""A push is confirmed or names the failing engine; a new engine catches up; known buckets aren't sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.models.checksum import checksum
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import (
    Completion,
    EngineDied,
    GroupLink,
    InlineBytes,
    Payload,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightDelta,
    WeightReceipt,
    WeightTensor,
)
from grmpipe.scheduler.weights.weight_push import (
    EngineLost,
    SyncConfig,
    SyncReport,
    WeightMismatch,
    WeightsNotFinite,
    WeightSyncTimeout,
    describe_tensors,
)
from grmpipe.scheduler.weights.weight_sync import NoEngines, WeightSync

PROBE = (5, 6, 7, 8)
NUM_BYTES = 3 * 2 * 16 * len("layers.0.q")


def bucket_of(contents: dict[str, bytes], dtype: str, payload: Payload | None = None) -> WeightBucket:
    return WeightBucket(
        tensors=tuple(
            WeightTensor(name=name, dtype=dtype, shape=(len(data) // (4 if dtype == "float32" else 2),),
                         checksum=checksum(data))
            for name, data in contents.items()
        ),
        payload=payload or InlineBytes(data=tuple(np.frombuffer(data, np.uint8) for data in contents.values())),
    )  # fmt: skip


class Source:
    """Three buckets of two tensors; scores every token -1, like scripted engines. Records its calls."""

    def __init__(self, *, dtype: str = "float32", hangs_at: int | None = None, score: float = -1.0) -> None:
        self.weights = {f"layers.{n}.{part}": f"layers.{n}.{part}".encode() * 16 for n in range(3) for part in "qk"}
        self.num_fixed = 0
        self.steps = 0
        self.hold = asyncio.Lock()
        self.asked: list[str] = []
        self.links: list[GroupLink | None] = []
        self.in_bucket: Callable[[int], None] = lambda index: None
        self._dtype, self._hangs_at, self._score = dtype, hangs_at, score

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        async with self.hold:
            self.asked.append("hold")
            yield self.steps
            self.asked.append("let go")

    async def step(self, seconds: float = 0.0) -> None:
        async with self.hold:
            await asyncio.sleep(seconds)
            self.steps += 1

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        assert self.hold.locked()
        return (self._score,) * (len(token_ids) - 1)

    async def connect(self, link: GroupLink | None) -> None:
        self.links.append(link)

    async def num_buckets(self) -> int:
        return 3

    async def num_fixed_buckets(self) -> int:
        return self.num_fixed

    async def bucket(self, index: int) -> WeightBucket:
        assert self.hold.locked()
        self.asked.append(f"bucket {index}")
        self.in_bucket(index)
        if index == self._hangs_at:
            self._hangs_at = None
            await asyncio.Event().wait()
        names = (f"layers.{index}.q", f"layers.{index}.k")
        return bucket_of({name: self.weights[name] for name in names}, self._dtype)


class Broadcaster(Source):
    """Its engines echo the checksums that it sends: `Faulty` receives no bytes."""

    def __init__(self, *, takes_s: float = 0.0, fault: str = "") -> None:
        super().__init__()
        self._takes_s, self.fault = takes_s, fault
        self.meets_s = 0.0

    async def connect(self, link: GroupLink | None) -> None:
        await super().connect(link)
        await asyncio.sleep(self.meets_s)

    async def list_tensors(self) -> tuple[tuple[WeightTensor, ...], ...]:
        self.asked.append("list")
        return self.tensors()

    def tensors(self) -> tuple[tuple[WeightTensor, ...], ...]:
        names = [(f"layers.{index}.q", f"layers.{index}.k") for index in range(3)]
        return tuple(bucket_of({name: self.weights[name] for name in pair}, "float32").tensors for pair in names)

    async def broadcast(self, first: int, version: int) -> dict[str, str]:
        self.asked.append(f"broadcast {first}")
        await asyncio.sleep(self._takes_s)
        if self.fault:
            self.fault = ""
            raise ConnectionError("weights: sending 'layers.1.q' .. 'layers.1.k' failed")
        sent = [tensor for bucket in self.tensors()[first:] for tensor in bucket]
        return {tensor.name: tensor.checksum for tensor in sent}


class Heavy(Broadcaster):
    """Its tensors claim to be large."""

    def tensors(self) -> tuple[tuple[WeightTensor, ...], ...]:
        return tuple(tuple(replace(tensor, shape=(10**10,)) for tensor in bucket) for bucket in super().tensors())


class Differing(Source):
    """Its buckets take five packed bytes each if they hold what changed."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[bool] = []

    async def send_changes(self, wanted: bool) -> None:
        assert self.hold.locked()
        self.wanted.append(wanted)

    async def bucket(self, index: int) -> WeightBucket:
        whole = await super().bucket(index)
        size = 5 if self.wanted[-1] else NUM_BYTES // 3
        packed = WeightTensor(name=f"bucket {index}", dtype="uint8", shape=(size,), checksum="")
        inner = WeightBucket(tensors=(packed,), payload=InlineBytes(data=()))
        return replace(whole, payload=WeightDelta(index=index, base="", packed=inner))


class Faulty(SimulatedEngine):
    """Fails once, in the way of its name; then it works. Records what it was sent."""

    def __init__(self, fault: str = "", load_s: float = 0.0) -> None:
        super().__init__("policy", lambda ids, params, context: Script(token_ids=(1,), text="x"))
        self.fault = fault
        self.load_s = load_s
        self.links: list[GroupLink | None] = []
        self.loaded: list[str] = []
        self.log: list[str] = []
        self.paused = False
        self.echo: dict[str, str] = {}
        self.meets_s = 0.0

    def _goes_wrong(self, fault: str) -> bool:
        wrong = self.fault == fault
        if wrong:
            self.fault = ""
        return wrong

    async def pause(self) -> None:
        self.paused = True
        await super().pause()

    async def resume(self) -> None:
        self.paused = False
        await super().resume()

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        assert self.paused
        self.links.append(link)
        self.echo = {}
        await asyncio.sleep(self.meets_s)

    async def load_bucket(self, bucket: WeightBucket) -> None:
        assert self.paused
        names = [tensor.name for tensor in bucket.tensors]
        self.log.append(f"load {names[0]}")
        await asyncio.sleep(self.load_s)
        self.log.append(f"loaded {names[0]}")
        self.loaded += names
        echo = {tensor.name: tensor.checksum for tensor in bucket.tensors}
        if isinstance(bucket.payload, InlineBytes):
            echo = {name: checksum(data.tobytes()) for name, data in zip(names, bucket.payload.data, strict=True)}
        if names[0] == "layers.1.q":
            if self._goes_wrong("hang"):
                await asyncio.Event().wait()
            if self._goes_wrong("die"):
                raise EngineDied("killed by signal 9")
            if self._goes_wrong("bit"):
                echo[names[0]] = "0" * 16
            if self._goes_wrong("layer"):
                echo = dict.fromkeys(echo, "0" * 16)
            if self._goes_wrong("lost"):
                del echo[names[0]]
            if self._goes_wrong("unhashed"):
                echo = dict.fromkeys(echo, "")
        self.echo |= echo

    async def commit_weights(self, version: int) -> WeightReceipt:
        self.version = version - 1 if self._goes_wrong("version") else version
        unapplied = ("layers.1.q", "layers.2.k") if self._goes_wrong("unapplied") else ()
        return WeightReceipt(version=self.version, checksums=self.echo, unapplied=unapplied)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        assert not self.paused, "an engine that is paused can't score"
        logprobs = (-1.0,) * (len(token_ids) - 1)
        for fault, error in (("stale", 0.8), ("drift", 0.01), ("noise", 0.2), ("nan", float("nan"))):
            if self._goes_wrong(fault):
                return tuple(logprob + error for logprob in logprobs)
        return logprobs


async def address() -> tuple[str, int]:
    return "127.0.0.1", 4711


def named(*engines: Faulty) -> dict[str, Faulty]:
    return {f"policy-{index}": engine for index, engine in enumerate(engines)}


async def push_to(*engines: Faulty, source: Source | None = None, deadline_s: float = 5.0) -> SyncReport:
    sync = WeightSync(source or Source(), PROBE, SyncConfig(deadline_s=deadline_s))
    return await sync.push(lambda: named(*engines), 3)


# -- one push ------------------------------------------------------------------------------------------------------


def test_a_push_reports_what_it_moved_and_resumes_all() -> None:
    async def scene() -> None:
        engines = Faulty(load_s=1.0), Faulty(load_s=2.0)
        report = await push_to(*engines, deadline_s=60)
        assert report.version == 3
        assert report.num_bytes == NUM_BYTES
        assert report.probe_error == 0
        assert report.pause_seconds == report.seconds == pytest.approx(6.0)
        assert [(engine.version, engine.paused) for engine in engines] == [(3, False), (3, False)]

    run_virtually(scene)


def test_the_learner_holds_still_while_it_is_read_and_the_next_bucket_is_made_while_one_is_loaded() -> None:
    async def scene() -> None:
        source, engine = Source(), Faulty(load_s=1.0)
        source.in_bucket = lambda index: engine.log.append(f"bucket {index}")
        await push_to(engine, source=source)
        assert source.asked == ["hold", "bucket 0", "bucket 1", "bucket 2", "let go"]
        order = engine.log.index
        for index in range(2):
            start, end = order(f"load layers.{index}.q"), order(f"loaded layers.{index}.q")
            assert order(f"bucket {index + 1}") < end, "the next one is made meanwhile"
            assert start < order(f"load layers.{index + 1}.q")
        assert order("bucket 2") > order("loaded layers.0.q"), "two buckets are alive at most"

    run_virtually(scene)


def test_requests_in_flight_continue_under_the_new_weights() -> None:
    async def main() -> Completion:
        engine = SimulatedEngine(
            "policy", lambda ids, params, context: Script(token_ids=(1,) * 20, text="x"), tokens_per_s=200
        )
        context = RequestContext(request_id="r", group_id="g", role="policy")
        answer = asyncio.create_task(engine.generate((1,), SamplingParams(max_new_tokens=20), context))
        await asyncio.sleep(0.03)
        await WeightSync(Source(), PROBE, SyncConfig()).push(lambda: {"policy-0": engine}, 3)
        return await answer

    completion = asyncio.run(main())
    assert len(completion.token_ids) == 20
    assert [span.version for span in completion.versions] == [0, 3]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "bit",
            r"policy-1 received other weights than version 3 in layers\.1\.q: layers\.1\.q arrived as 0{16}, \w+ was",
        ),
        (
            "layer",
            r"policy-1 received other weights than version 3 in layers\.1\.\* \(2 tensors\): layers\.1\.k arrived as 0",
        ),
        (
            "unapplied",
            r"policy-1 received version 3 but has not applied it in layers\.1\.q, layers\.2\.k: its parameters",
        ),
        ("lost", r"policy-1 .* in layers\.1\.q: layers\.1\.q arrived as nothing"),
        ("version", "policy-1 reports version 2; version 3 was sent"),
        ("stale", r"policy-1 received version 3, but its score of the probe differs by 0\.8 nats"),
        ("drift", r"policy-1 .* 0\.01 nats .* tolerance 0\.001\)"),
        ("nan", "policy-1 .* by nan nats"),
    ],
)
def test_a_mismatch_names_engine_and_tensors_and_leaves_all_paused_until_a_push_succeeds(
    fault: str, words: str
) -> None:
    async def main() -> None:
        engines = Faulty(), Faulty(fault)
        with pytest.raises(WeightMismatch, match=words):
            await push_to(*engines)
        assert [engine.paused for engine in engines] == [True, True]
        await push_to(*engines)
        assert [engine.paused for engine in engines] == [False, False]

    asyncio.run(main())


def test_an_engine_that_cannot_hash_is_checked_by_its_probe_only() -> None:
    asyncio.run(push_to(Faulty("unhashed")))


def test_sixteen_bit_weights_get_the_wider_tolerance() -> None:
    async def main() -> None:
        report = await push_to(Faulty("drift"), source=Source(dtype="bfloat16"))
        assert report.probe_error == pytest.approx(0.01)
        with pytest.raises(WeightMismatch):
            await push_to(Faulty("stale"), source=Source(dtype="bfloat16"))

    asyncio.run(main())


def test_after_a_push_that_proved_itself_an_engine_may_not_be_far_noisier() -> None:
    async def main() -> None:
        source, engine = Source(dtype="bfloat16"), Faulty()
        sync = WeightSync(source, PROBE, SyncConfig())
        await sync.push(lambda: named(engine), 1)
        engine.fault = "drift"
        await sync.push(lambda: named(engine), 2)  # 0.01 nats
        engine.fault = "noise"
        with pytest.raises(WeightMismatch, match=r"0\.2 nats .* tolerance 0\.1\)"):
            await sync.push(lambda: named(engine), 3)

    asyncio.run(main())


def test_a_large_model_has_the_time_that_its_bytes_take_and_a_hung_engine_no_more() -> None:
    """Pushing 80 GB buckets to 32 engines, which load them at 400 MB/s each. When the last one is on its way, an engine
    has the time of that one.
    """

    async def scene() -> None:
        source = Heavy(takes_s=400.0)
        engines = [Faulty(load_s=200.0) for _ in range(32)]
        sync = WeightSync(source, PROBE, SyncConfig(), transport="gloo", group="gloo", new_address=address)
        report = await sync.push(lambda: named(*engines), 1)
        assert report.seconds == pytest.approx(600)
        engines[7].fault = "hang"
        clock = asyncio.get_running_loop().time
        started_s = clock()
        with pytest.raises(WeightSyncTimeout, match=r"within 1260 s; waiting for policy-7 to receive 3 buckets$"):
            await sync.push(lambda: named(*engines), 2)
        assert clock() - started_s == pytest.approx(400 + 60 + 800)

    run_virtually(scene)


def test_a_new_group_has_time_of_its_own_to_meet() -> None:
    async def scene() -> None:
        source, engine = Broadcaster(), Faulty()
        sync = WeightSync(source, PROBE, SyncConfig(), transport="gloo", group="gloo", new_address=address)
        engine.meets_s = source.meets_s = 100.0
        assert (await sync.push(lambda: named(engine), 1)).seconds == pytest.approx(100)
        assert source.links[0] is not None
        assert (source.links[0].timeout_s, source.links[0].meeting_timeout_s) == (20, 120)
        with pytest.raises(WeightSyncTimeout, match="within 60 s; waiting for policy-0 to receive 3 buckets"):
            await sync.push(lambda: named(engine), 2)  # in the group that it has

    run_virtually(scene)


def test_a_learner_that_diverged_sends_nothing() -> None:
    async def main() -> None:
        engine = Faulty()
        with pytest.raises(WeightsNotFinite, match=r"not finite at version 3: .* train\.lr"):
            await push_to(engine, source=Source(score=float("nan")))
        assert not engine.loaded
        assert not engine.paused

    asyncio.run(main())


def test_an_engine_that_hangs_is_named_with_its_tensors_and_needs_no_restart() -> None:
    async def scene() -> None:
        engines = Faulty(), Faulty("hang")
        with pytest.raises(
            WeightSyncTimeout, match=r"waiting for policy-1 to load bucket 1 \(layers\.1\.q \.\. layers\.1\.k\)$"
        ) as caught:
            await push_to(*engines)
        assert caught.value.waiting_for == {"policy-1"}
        assert asyncio.get_running_loop().time() == pytest.approx(5.0, abs=1e-3)
        assert (await push_to(*engines)).version == 3

    run_virtually(scene)


def test_a_learner_that_hangs_is_named_too() -> None:
    async def scene() -> None:
        source = Source(hangs_at=2)
        with pytest.raises(WeightSyncTimeout, match=r"waiting for learner to send bucket 2$"):
            await push_to(Faulty(), source=source)
        assert not source.hold.locked()
        assert (await push_to(Faulty(), source=source)).version == 3

    run_virtually(scene)


def test_an_engine_killed_in_mid_push_ends_it_by_name_and_the_rest_take_the_next_one() -> None:
    async def main() -> None:
        dying, other = Faulty("die"), Faulty()
        sync = WeightSync(Source(), PROBE, SyncConfig())
        with pytest.raises(
            EngineLost, match=r"policy-0 died while it was asked to load bucket 1 \(layers\.1\.q .*: killed by signal 9"
        ) as caught:
            await sync.push(lambda: named(dying, other), 3)
        assert (caught.value.name, caught.value.engine) == ("policy-0", dying)
        assert other.paused
        await sync.push(lambda: {"policy-1": other}, 3)
        assert (other.version, other.paused) == (3, False)

    asyncio.run(main())


def test_push_without_engines_fails() -> None:
    with pytest.raises(NoEngines):
        asyncio.run(push_to())


# -- broadcasts ----------------------------------------------------------------------------------------------------


def test_a_broadcast_has_a_group_of_all_ranks_and_keeps_it() -> None:
    async def main() -> None:
        source, engines = Broadcaster(), (Faulty(), Faulty())
        sync = WeightSync(
            source,
            PROBE,
            SyncConfig(deadline_s=30),
            transport="gloo",
            group="gloo",
            ranks_per_engine=2,
            new_address=address,
        )
        report = await sync.push(lambda: named(*engines), 1)
        assert report.transport == "gloo"
        links = [source.links[0], engines[0].links[0], engines[1].links[0]]
        assert all(link is not None for link in links)
        assert [link.rank for link in links if link] == [0, 1, 3]
        assert {(link.world_size, link.backend, link.port, link.timeout_s) for link in links if link} == {
            (5, "gloo", 4711, 10.0)
        }
        assert len({link.name for link in links if link}) == 1
        assert source.asked == ["hold", "list", "broadcast 0", "let go"]
        assert engines[1].loaded == list(source.weights)
        await sync.push(lambda: named(*engines), 2)
        assert source.links[1] == source.links[0]
        await sync.push(lambda: named(engines[0]), 3)
        assert source.links[2] is not None
        assert source.links[2].world_size == 3
        assert source.links[2].name != source.links[1].name  # type: ignore[union-attr]

    asyncio.run(main())


def test_after_a_failed_push_the_group_is_a_new_one() -> None:
    async def main() -> None:
        source, engine = Broadcaster(), Faulty()
        sync = WeightSync(source, PROBE, SyncConfig(), transport="gloo", group="gloo", new_address=address)
        await sync.push(lambda: named(engine), 1)
        engine.fault = "bit"
        with pytest.raises(WeightMismatch):
            await sync.push(lambda: named(engine), 2)
        await sync.push(lambda: named(engine), 3)
        names = [link.name for link in source.links if link]
        assert names[0] == names[1] != names[2]

    asyncio.run(main())


def test_a_member_that_fails_ends_a_broadcast_by_name_and_all_stay_paused() -> None:
    async def main() -> None:
        source, engines = Broadcaster(takes_s=0.01), (Faulty(), Faulty("die"))
        sync = WeightSync(source, PROBE, SyncConfig(), transport="gloo", group="gloo", new_address=address)
        with pytest.raises(EngineLost, match="policy-1 died while it was asked to receive 3 buckets: killed by signal"):
            await sync.push(lambda: named(*engines), 1)
        source.fault = "lost"
        with pytest.raises(ConnectionError, match="sending"):
            await sync.push(lambda: named(*engines), 2)
        assert [engine.paused for engine in engines] == [True, True]
        assert (await sync.push(lambda: named(*engines), 3)).version == 3
        assert len({link.name for link in source.links if link}) == 3, "a new group after each failure"

    asyncio.run(main())


def test_fixed_tensors_are_broadcast_to_an_engine_once() -> None:
    async def main() -> None:
        source, old, new = Broadcaster(), Faulty(), Faulty()
        source.num_fixed = 2
        sync = WeightSync(source, PROBE, SyncConfig(), transport="gloo", group="gloo", new_address=address)
        sizes = [(await sync.push(lambda: {"old": old}, version)).num_bytes for version in (1, 2)]
        sizes.append((await sync.push(lambda: {"old": old, "new": new}, 3)).num_bytes)
        assert sizes == [NUM_BYTES, NUM_BYTES // 3, NUM_BYTES]
        assert [asked for asked in source.asked if asked.startswith("broadcast")] == [
            "broadcast 0", "broadcast 2", "broadcast 0",
        ]  # fmt: skip
        assert len(old.loaded) == 6 + 2 + 6

    asyncio.run(main())


# -- new engines ------------------------------------------------------------------------------------------------------


class Door:
    """Records the state at which a new engine is admitted."""

    def __init__(self, engine: Faulty) -> None:
        self.engine = engine
        self.version: int | None = None

    def __call__(self) -> None:
        assert not self.engine.paused
        assert self.version is None, "admitted twice"
        self.version = self.engine.version


def test_latecomer_gets_the_version_of_the_last_push_and_pauses_no_other() -> None:
    async def main() -> None:
        source, old, new = Source(), Faulty(), Faulty()
        sync = WeightSync(source, PROBE, SyncConfig())
        await sync.push(lambda: {"policy-0": old}, 3)
        loads, door = len(old.log), Door(new)
        report = await sync.catch_up("policy-1", new, door)
        assert (report.version, door.version, len(old.log)) == (3, 3, loads)

    asyncio.run(main())


def test_after_a_change_of_source_a_push_and_a_latecomer_get_the_new_ones_weights() -> None:
    async def main() -> None:
        first, second, old, new = Source(), Source(), Faulty(), Faulty()
        sync = WeightSync(first, PROBE, SyncConfig())
        await sync.push(lambda: {"policy-0": old}, 0)
        sync.send_from(second, PROBE[:3])
        await sync.push(lambda: {"policy-0": old}, 20)
        await sync.catch_up("policy-1", new, Door(new))
        assert (old.version, new.version) == (20, 20)
        assert [source.asked.count("bucket 0") for source in (first, second)] == [1, 2]

    asyncio.run(main())


def test_a_latecomer_waits_for_the_next_push_when_the_learner_has_stepped() -> None:
    async def main() -> None:
        source, old, new = Source(), Faulty(), Faulty()
        sync = WeightSync(source, PROBE, SyncConfig())
        door = Door(new)
        await sync.push(lambda: {"policy-0": old}, 3)
        await source.step()
        waiting = asyncio.create_task(sync.catch_up("policy-1", new, door))
        await sync.until_arrival()
        assert door.version is None
        await sync.push(lambda: {"policy-0": old}, 4)
        assert door.version == 4
        assert (await waiting).version == 4
        assert old.version == 4

    asyncio.run(main())


def test_a_latecomer_before_the_first_push_waits_for_it_even_alone() -> None:
    async def main() -> None:
        new = Faulty()
        door = Door(new)
        sync = WeightSync(Source(), PROBE, SyncConfig())
        waiting = asyncio.create_task(sync.catch_up("policy-0", new, door))
        await sync.until_arrival()
        await sync.push(dict, 1)
        await waiting
        assert door.version == 1

    asyncio.run(main())


@pytest.mark.parametrize("step_at_s", [0.0, 0.5, 1.0, 2.5, 4.0])
def test_a_step_that_comes_in_between_never_leaves_a_latecomer_behind(step_at_s: float) -> None:
    """Whenever the step comes, the engine is admitted with the last pushed version, and no push overlaps another."""

    async def scene() -> None:
        source, old, new = Source(), Faulty(load_s=0.5), Faulty(load_s=1.0)
        sync = WeightSync(source, PROBE, SyncConfig())
        serving = {"policy-0": old}
        await sync.push(lambda: serving, 3)
        start_s = asyncio.get_running_loop().time()
        door = Door(new)

        def admit() -> None:
            door()
            serving["policy-1"] = new

        async def learn() -> None:
            await asyncio.sleep(step_at_s)
            await source.step(seconds=1.0)
            await sync.push(lambda: serving, 4)

        async def come() -> None:
            await asyncio.sleep(0.2)
            await sync.catch_up("policy-1", new, admit)

        await asyncio.gather(learn(), come())
        assert door.version in (3, 4)
        assert (old.version, new.version) == (4, 4)
        assert source.asked.count("hold") == source.asked.count("let go")
        assert asyncio.get_running_loop().time() - start_s < 12

    run_virtually(scene)


def test_latecomer_that_dies_in_a_push_is_named_by_the_push() -> None:
    async def main() -> None:
        source, old, new = Source(), Faulty(), Faulty("die")
        sync = WeightSync(source, PROBE, SyncConfig())
        waiting = asyncio.create_task(sync.catch_up("policy-1", new, lambda: pytest.fail("it is dead")))
        await sync.until_arrival()
        with pytest.raises(EngineLost, match="policy-1 died") as caught:
            await sync.push(lambda: {"policy-0": old}, 4)
        sync.dismiss("policy-1", old, caught.value)
        assert sync.arrivals, "another engine of that name"
        sync.dismiss("policy-1", new, caught.value)
        with pytest.raises(EngineLost, match="policy-1 died"):
            await waiting
        await sync.push(lambda: {"policy-0": old}, 4)
        assert old.version == 4

    asyncio.run(main())


# -- words and settings --------------------------------------------------------------------------------------------


def test_tensors_are_named_by_their_layer() -> None:
    names = [f"model.layers.{n}.mlp.{part}.weight" for n in (0, 3) for part in ("up", "down")]
    assert describe_tensors(names) == "model.layers.0.* (2 tensors), model.layers.3.* (2 tensors)"
    assert describe_tensors(["lm_head.weight"]) == "lm_head.weight"
    assert describe_tensors([f"h.{n}.w" for n in range(9)]).endswith("h.3.w and 5 more layers")


@pytest.mark.parametrize("key", ["deadline_s", "probe_tolerance", "bucket_mb"])
def test_a_bad_value_names_its_key(key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        SyncConfig(**{key: -1})


def test_tensors_that_never_change_are_sent_to_an_engine_once() -> None:
    """And not even called for, unless an engine is new: then the others don't get it again."""

    async def scenario() -> None:
        source, old, new = Source(), Faulty(), Faulty()
        source.num_fixed = 2
        sync = WeightSync(source, PROBE, SyncConfig())
        first = await sync.push(lambda: {"old": old}, 1)
        source.asked.clear()
        second = await sync.push(lambda: {"old": old}, 2)
        assert [asked for asked in source.asked if asked.startswith("bucket")] == ["bucket 2"]
        assert first.num_bytes == NUM_BYTES and second.num_bytes == NUM_BYTES // 3
        old.loaded.clear()
        third = await sync.push(lambda: {"old": old, "new": new}, 3)
        assert third.num_bytes == NUM_BYTES
        assert len(new.loaded) == 3 * len(old.loaded) > 0

    asyncio.run(scenario())


def test_tensors_that_never_change_are_sent_again_after_a_failed_push_and_to_a_new_engine_of_the_name() -> None:
    async def scenario() -> None:
        source, engine = Source(), Faulty()
        source.num_fixed = 2
        sync = WeightSync(source, PROBE, SyncConfig())
        await sync.push(lambda: named(engine), 1)
        engine.fault = "stale"
        with pytest.raises(WeightMismatch):
            await sync.push(lambda: named(engine), 2)
        assert (await sync.push(lambda: named(engine), 2)).num_bytes == NUM_BYTES
        assert (await sync.push(lambda: named(engine), 3)).num_bytes == NUM_BYTES // 3
        assert (await sync.push(lambda: named(Faulty()), 4)).num_bytes == NUM_BYTES

    asyncio.run(scenario())


def test_changes_are_sent_only_where_every_engine_has_the_last_push() -> None:
    async def scenario() -> None:
        source, engine, late = Differing(), Faulty(), Faulty()
        sync = WeightSync(source, PROBE, SyncConfig(delta=True))
        first = await sync.push(lambda: named(engine), 1)
        second = await sync.push(lambda: named(engine), 2)
        assert source.wanted == [False, True]
        assert (first.num_bytes, first.weight_bytes) == (NUM_BYTES, NUM_BYTES)
        assert (second.num_bytes, second.weight_bytes) == (3 * 5, NUM_BYTES)
        await sync.catch_up("late", late, lambda: None)  # alone, so the other engine goes on from what it has
        await sync.push(lambda: {**named(engine), "late": late}, 3)
        assert source.wanted[2:] == [False, True]
        engine.fault = "die"
        with pytest.raises(EngineLost):
            await sync.push(lambda: named(engine), 4)
        replaced = Faulty()
        await sync.push(lambda: {**named(replaced), "late": late}, 4)
        await sync.push(lambda: {**named(replaced), "late": late}, 5)
        assert source.wanted[4:] == [True, False, True]
        await sync.push(lambda: named(replaced), 6)  # the other one sleeps
        await sync.catch_up("late", late, lambda: None)
        await sync.push(lambda: {**named(replaced), "late": late}, 7)
        assert source.wanted[7:] == [True, False, True]
        replaced.fault = "bit"
        with pytest.raises(WeightMismatch):
            await sync.push(lambda: named(replaced), 8)
        await sync.push(lambda: {"late": late}, 8)  # it has version 7, but the learner's last buckets are others
        assert source.wanted[10:] == [True, False]

    asyncio.run(scenario())
