"""Both ends of a remote engine, with a connection that only counts between them."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

import pytest

from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import (
    Completion,
    EngineDied,
    EngineRefused,
    InlineBytes,
    RequestContext,
    SamplingParams,
    SharedMemory,
    WeightBucket,
    ignore_first_token,
)
from grmpipe.scheduler.processes.actors import ActorDied
from grmpipe.scheduler.processes.engine_host import EngineHost
from grmpipe.scheduler.processes.remote_engine import RemoteEngine


class Wire:
    """Passes calls to a host in this process, until it is cut."""

    def __init__(self) -> None:
        self.host = EngineHost()
        self.calls: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._cut = asyncio.Event()

    async def call(self, method: str, *args: object) -> object:
        self.calls[method] += 1
        answer = asyncio.ensure_future(self.host.call_in_order(next(self._numbers), method, *args))
        cut = asyncio.ensure_future(self._cut.wait())
        await asyncio.wait([answer, cut], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise ActorDied("policy-0", "the wire was cut")
        cut.cancel()
        return answer.result()

    def share(self, bucket: WeightBucket) -> object:
        self.calls["share"] += 1
        return bucket

    def cut(self) -> None:
        self._cut.set()


class Watched(SimulatedEngine):
    """An engine that knows its requests in progress."""

    busy: frozenset[str] = frozenset()

    # type: ignore[no-untyped-def]
    async def generate(self, prompt_ids, params, context, on_first_token=ignore_first_token):
        self.busy = self.busy | {context.request_id}
        try:
            return await super().generate(prompt_ids, params, context, on_first_token)
        finally:
            self.busy = self.busy - {context.request_id}


async def connect(tokens_per_s: float = 1e6) -> tuple[RemoteEngine, Wire, Watched]:
    engine = Watched(
        "policy",
        lambda ids, params, context: Script(token_ids=(params.seed, *ids), text="x"),
        tokens_per_s=tokens_per_s,
    )
    wire = Wire()
    await wire.host.start(lambda rank: engine, 0)
    return RemoteEngine(wire), wire, engine


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


def ask(
    engine: RemoteEngine, number: int, num_ids: int = 4, heard: Callable[[], None] = lambda: None
) -> asyncio.Task[Completion]:
    context = RequestContext(request_id=f"r{number}", group_id="g", role="policy")
    params = SamplingParams(max_new_tokens=64, seed=number)
    return asyncio.create_task(engine.generate(list(range(num_ids)), params, context, heard))  # type: ignore[arg-type]


def test_requests_of_one_tick_travel_together() -> None:
    async def main() -> None:
        engine, wire, _ = await connect()
        answers = await asyncio.gather(*(ask(engine, number) for number in range(256)))
        assert [answer.token_ids[0] for answer in answers] == list(range(256))
        assert wire.calls["deliver"] == 1
        assert wire.calls["collect"] < 32

    asyncio.run(main())


def test_the_end_of_a_trajectory_arrives_after_its_last_request_was_cancelled() -> None:
    async def main() -> None:
        engine, wire, far = await connect(tokens_per_s=100)
        busy_at_end: list[frozenset[str]] = []

        class Keeping(Watched):
            def end_trajectory(self, trajectory_id: str) -> None:
                busy_at_end.append(self.busy)

        last = ask(engine, 0)
        engine.end_trajectory("before")
        await until(lambda: bool(far.busy))
        far.__class__ = Keeping
        last.cancel()
        await asyncio.wait({last})
        engine.end_trajectory("g/0")
        await until(lambda: bool(busy_at_end))
        assert busy_at_end == [frozenset()]
        wire.cut()

    asyncio.run(main())


def test_the_first_token_is_heard_before_the_answer() -> None:
    async def main() -> None:
        engine, _, _ = await connect(tokens_per_s=100)
        heard = asyncio.Event()
        answer = ask(engine, 1, heard=heard.set)
        await heard.wait()
        assert not answer.done()
        await answer

    asyncio.run(main())


def test_control_calls_do_not_queue_behind_collect() -> None:
    async def main() -> None:
        engine, wire, _ = await connect(tokens_per_s=1)
        answer = ask(engine, 1)
        await until(lambda: wire.calls["collect"] > 0)
        async with asyncio.timeout(1):
            await engine.pause()
            await engine.begin_weights()
            await engine.load_bucket(WeightBucket(tensors=(), payload=InlineBytes(data=())))
            assert (await engine.commit_weights(3)).version == 3
            assert await engine.score([1, 2, 3]) == (-1.0, -1.0)
            await engine.resume()
        answer.cancel()

    asyncio.run(main())


def test_an_abort_right_after_its_request_still_finds_it() -> None:
    async def main() -> None:
        engine, _, _ = await connect(tokens_per_s=1)
        answer = ask(engine, 7)
        await asyncio.sleep(0)
        await engine.abort("r7")
        async with asyncio.timeout(1):
            assert (await answer).finish_reason == "abort"

    asyncio.run(main())


def test_cancelling_the_caller_ends_the_request_over_there() -> None:
    async def main() -> None:
        engine, _, far = await connect(tokens_per_s=1)
        answer, other = ask(engine, 1), ask(engine, 2)
        await until(lambda: far.busy == {"r1", "r2"})
        answer.cancel()
        await until(lambda: far.busy == {"r2"})
        other.cancel()
        await until(lambda: not far.busy)

    asyncio.run(main())


def test_errors_keep_their_kind() -> None:
    async def main(error: Exception) -> Exception:
        engine, wire, _ = await connect()

        def author(ids: object, params: object, context: object) -> Script:
            raise error

        await wire.host.start(lambda rank: SimulatedEngine("policy", author), 0)  # type: ignore[arg-type]
        with pytest.raises(Exception) as caught:
            await ask(engine, 1)
        return caught.value

    assert type(asyncio.run(main(EngineRefused("too long")))) is EngineRefused
    assert type(asyncio.run(main(EngineDied("out of memory")))) is EngineDied
    strange = asyncio.run(main(ZeroDivisionError("odd")))
    assert type(strange) is RuntimeError
    assert "ZeroDivisionError: odd" in str(strange)


def test_death_fails_all_in_flight_and_all_that_come_after() -> None:
    async def main() -> None:
        engine, wire, _ = await connect(tokens_per_s=1)
        answers = [ask(engine, number) for number in range(3)]
        await until(lambda: wire.calls["collect"] > 0)
        wire.cut()
        for outcome in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(outcome, EngineDied)
            assert "the wire was cut" in str(outcome)
        for late in (ask(engine, 9), engine.pause(), engine.abort("r9"), engine.score([1, 2])):
            with pytest.raises(EngineDied, match="the wire was cut"):
                await late

    asyncio.run(main())


def test_only_bytes_go_through_the_object_store() -> None:
    async def main() -> None:
        engine, wire, _ = await connect()
        await engine.pause()
        await engine.begin_weights()
        await engine.load_bucket(WeightBucket(tensors=(), payload=InlineBytes(data=())))
        assert wire.calls["share"] == 1
        with pytest.raises(ValueError, match=r"^sync\.transport: a simulated engine takes object_store only"):
            await engine.load_bucket(WeightBucket(tensors=(), payload=SharedMemory(path="/dev/shm/x")))
        assert wire.calls["share"] == 1

    asyncio.run(main())


def test_errors_of_a_push_keep_their_kind() -> None:
    class Odd(ConnectionError):
        """From a module that the other side may not have."""

    class Broken(SimulatedEngine):
        error: Exception = ValueError("weights: no tensor 'x'")

        async def load_bucket(self, bucket: WeightBucket) -> None:
            raise self.error

    async def main(error: Exception) -> Exception:
        engine, wire, _ = await connect()
        broken = Broken("policy", lambda ids, params, context: Script(token_ids=(1,), text="x"))
        broken.error = error
        await wire.host.start(lambda rank: broken, 0)
        with pytest.raises(Exception) as caught:
            await engine.load_bucket(WeightBucket(tensors=(), payload=InlineBytes(data=())))
        return caught.value

    for error in (ValueError("no tensor 'x'"), ConnectionError("closed by peer"), EngineDied("the core is gone")):
        assert type(asyncio.run(main(error))) is type(error)
        assert str(asyncio.run(main(error))) == str(error)
    assert type(asyncio.run(main(Odd("closed")))) is ConnectionError


def test_an_engine_that_sleeps_says_what_it_freed() -> None:
    class Sleepy(SimulatedEngine):
        async def sleep(self) -> int:
            return 7 << 20

        async def wake(self) -> None:
            self.woken = True

    async def main() -> None:
        engine, wire, _ = await connect()
        far = Sleepy("policy", lambda ids, params, context: Script(token_ids=(1,), text="x"))
        await wire.host.start(lambda rank: far, 0)
        assert await engine.sleep() == 7 << 20
        await engine.wake()
        assert far.woken

    asyncio.run(main())


def test_an_engine_that_died_in_a_living_process_is_dead_for_all_calls() -> None:
    """A core process or a server is dead, but its actor isn't: a check must report that."""

    class Headless(Watched):
        async def abort(self, request_id: str) -> None:
            raise EngineDied("the engine's core is gone")

    async def main() -> None:
        engine, wire, _ = await connect()
        far = Headless("policy", lambda ids, params, context: Script(token_ids=(1,), text="x"), tokens_per_s=1e-3)
        await wire.host.start(lambda rank: far, 0)
        answer = ask(engine, 1)
        await until(lambda: far.busy == {"r1"})
        with pytest.raises(EngineDied, match="the engine's core is gone"):
            await engine.abort("health look")
        with pytest.raises(EngineDied, match="the engine's core is gone"):
            await answer
        with pytest.raises(EngineDied):
            await engine.pause()

    asyncio.run(main())


def test_what_an_engines_start_found_comes_back_from_its_process() -> None:
    class Telling(SimulatedEngine):
        def describe_start(self) -> str:
            return "keys and values of 12 tokens"

    def make(kind: type[SimulatedEngine]) -> SimulatedEngine:
        return kind("policy", lambda ids, params, context: Script(token_ids=(1,)), tokens_per_s=1e6)

    async def scene() -> list[object]:
        return [await EngineHost().start(lambda rank, kind=kind: make(kind), 0) for kind in (Telling, SimulatedEngine)]

    assert asyncio.run(scene()) == ["keys and values of 12 tokens", ""]
    assert RemoteEngine(Wire(), "of 12 tokens").describe_start() == "of 12 tokens"
