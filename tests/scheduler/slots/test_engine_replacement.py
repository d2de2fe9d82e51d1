"""A dead engine is replaced, and its replacement never serves with old weights. On a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import pairwise
from typing import cast

import pytest
from weight_source import CountingLearner, Spans

from grmpipe.capacity.simulate.virtual_loop import VirtualLoop, run_virtually
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import (
    Completion,
    Engine,
    EngineDied,
    GroupLink,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightReceipt,
)
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.routing.router import RequestKillsEngines, Router
from grmpipe.scheduler.run_together import run_until
from grmpipe.scheduler.slots.engine_replacement import (
    EngineState,
    HealthConfig,
    RoleHealth,
    need_no_weights,
    push_to_living,
)
from grmpipe.scheduler.weights.weight_push import SyncConfig, WeightMismatch, WeightSyncTimeout
from grmpipe.scheduler.weights.weight_sync import WeightSync

PROBE = (1, 2, 3)
VERSION_OF_FILES = 0


class Fragile(SimulatedEngine):
    """Answers only by ids and seed, like a real engine. Once dead, every call reports it."""

    def __init__(self, *, dies_on: str = "") -> None:
        super().__init__("policy", self._write, tokens_per_s=10, version=VERSION_OF_FILES)
        self.asked: list[str] = []
        self.gone: str | None = None
        self.dies_on = dies_on
        self.hangs_on = ""
        self.score_error = 0.0

    def _write(self, ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        self._here("generate")
        self.asked.append(context.request_id)
        return Script(token_ids=(*ids, params.seed), text=context.request_id)

    def _here(self, method: str) -> None:
        if self.dies_on == method:
            self.die(f"killed at {method}")
        if self.gone is not None:
            raise EngineDied(self.gone)

    def die(self, reason: str) -> None:
        self.gone = reason
        super().die(reason)

    async def abort(self, request_id: str) -> None:
        self._here("abort")
        await super().abort(request_id)

    async def pause(self) -> None:
        self._here("pause")
        await super().pause()

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        self._here("begin")
        await super().begin_weights(link)

    async def load_bucket(self, bucket: WeightBucket) -> None:
        if self.hangs_on == "load":
            await asyncio.Event().wait()
        await asyncio.sleep(0.1)
        self._here("load")
        await super().load_bucket(bucket)

    async def commit_weights(self, version: int) -> WeightReceipt:
        self._here("commit")
        return await super().commit_weights(version)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        self._here("score")
        return tuple(logprob + self.score_error for logprob in await super().score(token_ids))


class Role:
    """A role with its engines, its health and, for a policy, its learner; starting an engine takes 5 s."""

    def __init__(
        self,
        engines: int = 2,
        *,
        policy: bool = True,
        start_s: float = 5.0,
        make: Callable[[], Fragile] = Fragile,
        **config: float,
    ) -> None:
        self.make = make
        self.engines = {f"policy-{n}": make() for n in range(engines)}
        self.spans = Spans()
        self.router = Router("policy", self.engines, self.spans)
        self.learner = CountingLearner("layers.0", "layers.1")
        self.sync = WeightSync(self.learner, PROBE, SyncConfig(deadline_s=20))
        self.start_s = start_s
        self.next_fault: list[Exception | Callable[[Fragile], None]] = []
        self.health = RoleHealth(
            "policy",
            self.router,
            self.restart,
            HealthConfig(**config),  # type: ignore[arg-type]
            self.sync.catch_up if policy else need_no_weights,
            self.spans,
        )

    async def restart(self, name: str) -> Engine:
        await asyncio.sleep(self.start_s)
        engine = self.make()
        fault = self.next_fault.pop(0) if self.next_fault else None
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            fault(engine)
        self.engines[name] = engine
        return engine

    async def push(self, version: int) -> None:
        await push_to_living(self.sync, self.router, version)

    async def learn(self, version: int, seconds: float = 1.0) -> None:
        await self.learner.step(seconds)
        await self.push(version)

    def ask(self, number: int, num_tokens: int = 2) -> asyncio.Task[Completion]:
        context = RequestContext(request_id=f"r{number}", group_id=f"g{number // 4}", role="policy")
        params = SamplingParams(max_new_tokens=8, seed=number)
        return asyncio.create_task(
            self.router.generate(tuple(range(num_tokens)), params, context)  # type: ignore[arg-type]
        )


def play(role_of: Callable[[], Role], scene: Callable[[Role], Awaitable[None]]) -> None:
    """Run a scene next to the health of a role, on a virtual clock."""

    async def main() -> None:
        role = role_of()
        await run_until(cast(Coroutine[object, object, None], scene(role)), health=role.health.run())

    run_virtually(main)


def expected(number: int, num_tokens: int = 2) -> tuple[int, ...]:
    return (*range(num_tokens), number)


# -- one death -----------------------------------------------------------------------------------------------------


def test_a_dead_judge_is_replaced_and_what_waits_is_answered_as_it_would_have_been() -> None:
    async def scene(role: Role) -> None:
        answers = [role.ask(number) for number in range(8)]
        await asyncio.sleep(0.1)
        role.engines["policy-0"].die("out of memory")
        done = await asyncio.gather(*answers)
        assert [answer.token_ids for answer in done] == [expected(number) for number in range(8)]
        assert role.health.states == {"policy-0": EngineState.HEALTHY}
        assert role.health.num_replaced == 1
        assert [name for _, name in role.spans.seen if name != "policy"] == ["died", "dead", "starting", "stale"]

    play(lambda: Role(1, policy=False), scene)


def test_a_policy_engine_is_stale_until_it_has_the_current_weights() -> None:
    async def scene(role: Role) -> None:
        await role.push(7)
        role.engines["policy-0"].die("gone")
        answer = role.ask(1)
        await asyncio.sleep(5.05)
        assert role.health.states["policy-0"] is EngineState.STALE
        assert not role.engines["policy-0"].asked
        assert [span.version for span in (await answer).versions] == [7]
        assert [name for _, name in role.spans.seen if name != "policy"] == ["died", "dead", "starting", "stale"]

    play(lambda: Role(1), scene)


def test_callers_keep_their_deadlines_while_no_engine_serves() -> None:
    async def scene(role: Role) -> None:
        role.engines["policy-0"].die("gone")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await role.ask(1)
        assert (await role.ask(2)).token_ids == expected(2)

    play(lambda: Role(1, policy=False), scene)


def test_an_engine_that_died_while_idle_is_noticed() -> None:
    async def scene(role: Role) -> None:
        role.engines["policy-1"].die("killed by signal 9")
        await asyncio.sleep(3.1 + 5.1)
        assert role.health.num_replaced == 1
        assert set(role.router.members.alive) == {"policy-0", "policy-1"}

    play(lambda: Role(2, policy=False, check_every_s=3.0), scene)


def test_late_news_of_an_old_death_does_not_harm_who_came_in_its_place() -> None:
    async def scene(role: Role) -> None:
        old = role.engines["policy-0"]
        old.die("gone")
        await role.ask(1)
        role.router.members.mark_dead("policy-0", old, EngineDied("gone, says somebody late"))
        assert set(role.router.members.alive) == {"policy-0"}
        assert role.health.num_replaced == 1

    play(lambda: Role(1, policy=False), scene)


# -- engines that hang ---------------------------------------------------------------------------------------------


class Stoppable(Fragile):
    """Once stopped, as by SIGSTOP, it answers nothing; if only `deaf`, it still works."""

    stopped = deaf = False

    async def generate(self, *args, **kwargs) -> Completion:  # type: ignore[no-untyped-def,override]
        completion = await super().generate(*args, **kwargs)
        return await asyncio.Event().wait() if self.stopped else completion  # type: ignore[return-value]

    async def abort(self, request_id: str) -> None:
        if self.stopped or self.deaf:
            await asyncio.Event().wait()
        await super().abort(request_id)

    async def pause(self) -> None:
        if self.stopped:
            await asyncio.Event().wait()
        await super().pause()


def test_an_engine_that_hangs_is_replaced_and_its_requests_are_answered_elsewhere() -> None:
    async def scene(role: Role) -> None:
        role.engines["policy-0"].stopped = True  # type: ignore[attr-defined]
        answers = await asyncio.gather(*(role.ask(number) for number in range(8)))
        assert [answer.token_ids for answer in answers] == [expected(number) for number in range(8)]
        assert 60 <= asyncio.get_running_loop().time() < 60 + 3 * 10
        await asyncio.sleep(10)
        assert role.health.num_replaced == 1

    play(lambda: Role(2, policy=False, make=Stoppable, hung_after_s=60), scene)


def test_an_engine_that_answers_requests_does_not_hang() -> None:
    async def scene(role: Role) -> None:
        role.engines["policy-0"].deaf = True  # type: ignore[attr-defined]
        for number in range(40):
            await role.ask(number)
            await asyncio.sleep(10)
        assert role.health.num_replaced == 0

    play(lambda: Role(1, policy=False, make=Stoppable, hung_after_s=60), scene)


def test_silence_while_the_event_loop_itself_stands_still_is_no_hang() -> None:
    """It blocks for 100 s in every check, in which the engine answers nothing: only the rest is its silence."""

    async def scene(role: Role) -> None:
        role.engines["policy-0"].stopped = True  # type: ignore[attr-defined]
        loop = asyncio.get_running_loop()
        for _ in range(4):
            await asyncio.sleep(7)  # a check has begun
            cast(VirtualLoop, loop).jump(100)
            await asyncio.sleep(3)
        assert role.health.num_replaced == 0
        await asyncio.sleep(40)
        assert role.health.num_replaced == 1, "it does hang"

    play(lambda: Role(1, policy=False, make=Stoppable, hung_after_s=60), scene)


def test_a_push_that_an_engine_hangs_in_buries_it_and_starts_over() -> None:
    async def scene(role: Role) -> None:
        role.engines["policy-0"].stopped = True  # type: ignore[attr-defined]
        await role.push(3)
        assert role.engines["policy-1"].version == 3
        await asyncio.sleep(30)
        assert (await role.ask(1)).versions[0].version == 3
        assert [engine.version for engine in role.engines.values()] == [3, 3]

    play(lambda: Role(2, make=Stoppable), scene)


def test_an_engine_that_alone_does_not_finish_a_push_is_replaced() -> None:
    """It answers checks: only its loading hangs."""

    async def scene(role: Role) -> None:
        role.engines["policy-0"].hangs_on = "load"
        await role.push(3)
        await asyncio.sleep(30)
        assert [engine.version for engine in role.engines.values()] == [3, 3]

    play(lambda: Role(2), scene)


# -- requests that kill --------------------------------------------------------------------------------------------


class Mortal(Fragile):
    """Dies of a request with the seed 666, like a kernel that fails at one length."""

    def _write(self, ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        if params.seed == 666 and self.gone is None:
            asyncio.get_running_loop().call_later(0.1, self.die, "illegal memory access")
        return super()._write(ids, params, context)


@pytest.mark.parametrize("num_engines", [1, 2, 8])
def test_a_request_that_killed_two_engines_is_refused_and_asked_no_more(num_engines: int) -> None:
    async def scene(role: Role) -> None:
        with pytest.raises(
            RequestKillsEngines, match=r"killed 2 engines: policy-\d, policy-\d; .*illegal memory access"
        ):
            await role.ask(666)
        await asyncio.sleep(60)
        assert role.health.num_replaced == 2
        assert len(role.router.members.alive) == num_engines
        assert (await role.ask(1)).token_ids == expected(1)

    play(lambda: Role(num_engines, policy=False, make=Mortal), scene)


def test_deaths_by_such_requests_use_up_no_replacements() -> None:
    async def scene(role: Role) -> None:
        for _ in range(5):
            with pytest.raises(RequestKillsEngines):
                await role.ask(666)
            await asyncio.sleep(10)
        assert role.health.num_replaced == 10
        assert (await role.ask(1)).token_ids == expected(1)

    play(lambda: Role(2, policy=False, make=Mortal), scene)


def test_engines_that_were_dead_before_a_request_came_were_not_killed_by_it() -> None:
    async def scene(role: Role) -> None:
        for engine in role.engines.values():
            engine.gone = "the machine is gone"  # not noticed yet
        assert (await role.ask(1)).token_ids == expected(1)

    play(lambda: Role(4, policy=False), scene)


def test_each_engine_gets_its_replacements_again_after_an_hour() -> None:
    async def scene(role: Role) -> None:
        for _ in range(3):
            for engine in list(role.engines.values()):
                engine.die("worn out")
            assert (await role.ask(1)).token_ids == expected(1)
            await asyncio.sleep(3600)
        for _ in range(2):
            role.engines["policy-0"].die("worn out")
            await asyncio.sleep(30)
        assert role.health.states == {"policy-0": EngineState.LOST, "policy-1": EngineState.HEALTHY}
        assert role.health.num_replaced == 7

    play(lambda: Role(2, policy=False, max_replacements=1), scene)


# -- exhaustion ----------------------------------------------------------------------------------------------------


def test_role_without_replacements_uses_its_remaining_engines_and_ends_with_the_first_cause() -> None:
    async def scene(role: Role) -> None:
        role.engines["policy-0"].die("the first cause")
        assert (await asyncio.gather(*(role.ask(number) for number in range(4))))[3].token_ids == expected(3)
        assert role.health.states["policy-0"] is EngineState.LOST
        role.engines["policy-1"].die("the second")
        with pytest.raises(EngineDied, match=r"all engines of role policy died; the first: policy-0: the first cause"):
            await role.ask(9)
        with pytest.raises(EngineDied, match="the first cause"):
            await role.push(3)

    play(lambda: Role(2, max_replacements=0), scene)


def test_a_replacement_that_fails_to_start_counts_and_is_tried_again() -> None:
    async def scene(role: Role) -> None:
        role.next_fault = [OSError("no memory"), ValueError("no such model")]
        role.engines["policy-0"].die("gone")
        assert (await role.ask(1)).token_ids == expected(1)
        assert role.health.num_replaced == 1
        role.engines["policy-0"].die("gone again")
        with pytest.raises(EngineDied, match="the first: policy-0: gone$"):
            await role.ask(2)

    play(lambda: Role(1, policy=False, max_replacements=3), scene)


@pytest.mark.parametrize(("max_replacements", "num_engines", "passed_s"), [(3, 1, 0.0), (3, 2, 4.0), (0, 1, 4.0)])
def test_clock_pauses_only_while_no_engine_lives_and_one_is_starting(
    max_replacements: int, num_engines: int, passed_s: float
) -> None:
    async def go() -> float:
        engines: dict[str, Engine] = {
            f"grm-{number}": SimulatedEngine("grm", lambda ids, params, context: Script(token_ids=(1,), text=""))
            for number in range(num_engines)
        }
        router = Router("grm", engines)

        async def restart(name: str) -> Engine:
            await asyncio.sleep(10)
            return engines[name]

        health, clock = (
            RoleHealth("grm", router, restart, HealthConfig(max_replacements=max_replacements)),
            ActiveClock(),
        )
        health.clocks.add(clock)
        running = asyncio.create_task(health.run())
        router.members.mark_dead("grm-0", engines["grm-0"], EngineDied("killed"))
        began_s = clock.now()
        await asyncio.sleep(4)
        passed = clock.now() - began_s
        await asyncio.sleep(10)
        assert clock.now() - began_s >= passed + 4 - 1e-6  # it runs again once the engine is replaced
        running.cancel()
        return passed

    assert run_virtually(go) == pytest.approx(passed_s, abs=1e-3)


def test_when_no_try_succeeds_those_who_wait_hear_the_first_cause() -> None:
    async def scene(role: Role) -> None:
        role.next_fault = [OSError("no memory")] * 2
        role.engines["policy-0"].die("out of memory")
        waiting = [role.ask(number) for number in range(3)]
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, EngineDied)
            assert "policy-0: out of memory" in str(outcome)

    play(lambda: Role(1, policy=False, max_replacements=2), scene)


def test_a_replacement_that_never_starts_is_given_up_at_its_deadline() -> None:
    async def scene(role: Role) -> None:
        role.start_s = 1e9
        role.engines["policy-0"].die("gone")
        with pytest.raises(EngineDied):
            await role.ask(1)
        assert asyncio.get_running_loop().time() < 40

    play(lambda: Role(1, policy=False, max_replacements=1, start_deadline_s=30), scene)


@pytest.mark.parametrize("method", ["pause", "begin", "load", "commit", "score"])
def test_a_replacement_that_dies_while_it_catches_up_is_replaced_itself(method: str) -> None:
    def dying(engine: Fragile) -> None:
        engine.dies_on = method

    async def scene(role: Role) -> None:
        await role.push(3)
        role.next_fault = [dying]
        role.engines["policy-0"].die("gone")
        assert (await role.ask(1)).versions[0].version == 3
        assert role.health.num_replaced == 1

    play(lambda: Role(1, max_replacements=2), scene)


def test_wrong_weights_in_a_replacement_stop_the_run() -> None:
    def wrong(engine: Fragile) -> None:
        engine.score_error = 0.8

    async def scene(role: Role) -> None:
        await role.push(3)
        role.next_fault = [wrong]
        role.engines["policy-0"].die("gone")
        await role.ask(1)

    with pytest.raises(
        WeightMismatch, match=r"policy-0 received version 3, but its score of the probe differs by 0\.8 nats"
    ):
        play(lambda: Role(1), scene)


# -- pushes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pause", "begin", "load", "commit", "score"])
def test_an_engine_that_dies_in_a_push_costs_the_others_nothing_but_time(method: str) -> None:
    async def scene(role: Role) -> None:
        role.engines["policy-0"].dies_on = method
        await role.learn(1)
        assert role.engines["policy-1"].version == 1
        await asyncio.sleep(10)
        assert set(role.router.members.alive) == {"policy-0", "policy-1"}
        assert role.engines["policy-0"].version == 1
        assert [(await role.ask(number)).versions[0].version for number in range(4)] == [1] * 4

    play(Role, scene)


def test_when_the_only_engine_dies_in_a_push_its_replacement_gets_the_new_version() -> None:
    async def scene(role: Role) -> None:
        await role.push(0)
        role.engines["policy-0"].dies_on = "load"
        await role.learn(1)
        assert role.engines["policy-0"].version == 1
        assert (await role.ask(1)).versions[0].version == 1

    play(lambda: Role(1), scene)


def test_a_dead_engine_that_only_fell_silent_is_found_out_at_the_deadline() -> None:
    async def scene(role: Role) -> None:
        silent = role.engines["policy-0"]
        silent.hangs_on = "load"
        silent.gone = "killed by signal 9"
        silent._here = lambda method: SimulatedDeath(silent, method)  # type: ignore[method-assign]
        await role.push(1)
        assert 20 <= asyncio.get_running_loop().time() < 30
        assert role.engines["policy-1"].version == 1

    class SimulatedDeath:
        """Only a check reports the death: every other call is answered until it hangs."""

        def __init__(self, engine: Fragile, method: str) -> None:
            if method == "abort":
                raise EngineDied("killed by signal 9")

    play(lambda: Role(2, check_every_s=1e6), scene)


def test_a_push_that_no_engine_finishes_stops_the_run_while_they_live() -> None:
    async def scene(role: Role) -> None:
        for engine in role.engines.values():
            engine.hangs_on = "load"
        await role.push(1)

    with pytest.raises(WeightSyncTimeout, match=r"policy-0 to load bucket 0 \(layers\.0\)"):
        play(lambda: Role(2), scene)


def test_a_broken_connection_to_the_dead_is_not_the_cause() -> None:
    """In a broadcast the surviving members notice first."""

    class Peer(Fragile):
        async def load_bucket(self, bucket: WeightBucket) -> None:
            if self.gone is None and victim.gone is None:
                victim.die("killed by signal 9")
                raise ConnectionError("connection closed by peer")
            await super().load_bucket(bucket)

    victim = Fragile()

    async def main() -> None:
        role = Role(0)
        role.router.members.admit("policy-0", Peer())
        role.router.members.admit("policy-1", victim)
        role.health.states |= dict.fromkeys(role.router.members.alive, EngineState.HEALTHY)
        await run_until(role.push(1), health=role.health.run())
        assert role.router.members.alive["policy-0"].version == 1  # type: ignore[attr-defined]

    run_virtually(main)


def test_a_broken_connection_without_a_death_stops_the_run() -> None:
    class Peer(Fragile):
        async def load_bucket(self, bucket: WeightBucket) -> None:
            raise ConnectionError("connection closed by peer")

    async def main() -> None:
        role = Role(0)
        role.router.members.admit("policy-0", Peer())
        await role.push(1)

    with pytest.raises(ConnectionError, match="closed by peer"):
        run_virtually(main)


# -- chaos ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_chaos_every_request_is_answered_once_as_without_deaths_and_never_by_stale_weights(seed: int) -> None:
    """Engines die at random: idle, decoding, catching up, in pushes; some don't start. The learner pushes meanwhile."""
    rng = random.Random(seed)
    weak = ["pause", "begin", "load", "commit", "score", "generate"]
    answers: Counter[int] = Counter()
    pushed: list[tuple[float, int]] = []

    def now_s() -> float:
        return asyncio.get_running_loop().time()

    def maybe_weak(engine: Fragile) -> None:
        engine.dies_on = rng.choice(weak) if rng.random() < 0.5 else ""

    async def strike(role: Role) -> None:
        while True:
            await asyncio.sleep(rng.random() * 12)
            name = rng.choice(list(role.engines))
            if rng.random() < 0.5:
                role.engines[name].die("struck")
            else:
                role.engines[name].dies_on = rng.choice(weak)
            role.next_fault = [rng.choice([OSError("no memory"), maybe_weak, lambda engine: None]) for _ in range(3)]

    async def learn(role: Role) -> None:
        for version in range(1, 21):
            await asyncio.sleep(rng.random() * 8)
            await role.learn(version, seconds=rng.random() * 3)
            pushed.append((now_s(), version))

    async def client(role: Role, number: int) -> None:
        await asyncio.sleep(rng.random() * 100)
        begun_s = now_s()
        completion = await role.ask(number, num_tokens=1 + number % 30)
        answers[number] += 1
        assert completion.token_ids == expected(number, 1 + number % 30)
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.versions[0].start == 0
        assert completion.versions[-1].end == len(completion.token_ids)
        assert all(a.end == b.start and a.version < b.version for a, b in pairwise(completion.versions))
        floor = max((version for at_s, version in pushed if at_s <= begun_s), default=VERSION_OF_FILES)
        assert completion.oldest_version >= floor, "sampled by stale weights"

    async def scene(role: Role) -> None:
        role.router.max_deaths_per_request = 10**6
        striking = asyncio.create_task(strike(role))
        await asyncio.gather(learn(role), *(client(role, number) for number in range(200)))
        striking.cancel()
        assert set(answers.values()) == {1}
        assert len(answers) == 200
        assert role.health.num_replaced > 3
        assert all(engine.version == 20 for engine in role.router.members.alive.values())  # type: ignore[attr-defined]

    play(lambda: Role(1 + seed % 3, check_every_s=4.0, max_replacements=10**6), scene)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_replacements", -1), ("check_every_s", 0), ("start_deadline_s", 0)],
)
def test_a_bad_value_names_its_key(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        HealthConfig(**{key: value})  # type: ignore[arg-type]
