"""Slots that change their role: nothing is lost, duplicated or changed, and no weights are old. On a virtual clock."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

import pytest
from weight_source import CountingLearner, Spans

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import (
    Completion,
    Engine,
    EngineDied,
    GroupLink,
    RequestContext,
    SamplingParams,
)
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.routing.router import Continuation, Router
from grmpipe.scheduler.run_together import run_until
from grmpipe.scheduler.slots.elastic import ElasticPool, ElasticRole
from grmpipe.scheduler.slots.engine_replacement import (
    BringCurrent,
    HealthConfig,
    RoleHealth,
    need_no_weights,
    push_to_living,
)
from grmpipe.scheduler.slots.time_share import put_to_sleep
from grmpipe.scheduler.weights.weight_push import SyncConfig
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.tiny.resolve import resolve_model

TOKENS_PER_S = 10
START_S = 3.0
ROLES = ("policy", "grm")
THREE = (*ROLES, "safety")
PROBE = (1, 2, 3)


def unmoved(seed: int, num_sampled: int) -> int:
    return seed


class Spoken(SimulatedEngine):
    """Generates 0, 1, 2, .. up to its seed; continues where another engine stopped. Sleeps, wakes, dies."""

    def __init__(self, role: str) -> None:
        super().__init__(role, self._write, tokens_per_s=TOKENS_PER_S)
        self.role = role
        self.awake = True
        self.gone: str | None = None
        self.served: list[tuple[str, int]] = []  # (request, version at its beginning)

    def _write(self, ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        if self.gone is not None:
            raise EngineDied(self.gone)
        assert self.awake, "asked in its sleep"
        assert tuple(ids[len(ids) - context.num_sampled :]) == tuple(range(context.num_sampled))
        self.served.append((context.request_id, self.version))
        length = context.num_sampled + params.max_new_tokens
        return Script(token_ids=tuple(range(context.num_sampled, length)), text="unmoved", finish_reason="length")

    def die(self, reason: str) -> None:
        self.gone = reason
        super().die(reason)

    async def abort(self, request_id: str) -> None:
        if self.gone is not None:
            raise EngineDied(self.gone)
        await super().abort(request_id)

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        assert self.awake, "pushed to in its sleep"
        if self.gone is not None:
            raise EngineDied(self.gone)
        await super().begin_weights(link)

    async def sleep(self) -> int:
        if self.gone is not None:
            raise EngineDied(self.gone)
        self.awake = False
        return 1

    async def wake(self) -> None:
        await asyncio.sleep(0.2)
        if self.gone is not None:
            raise EngineDied(self.gone)
        self.awake = True


class Bench:
    """An elastic pool with all its parts."""

    def __init__(
        self,
        num_slots: int,
        *,
        roles: Sequence[str] = ROLES,
        sleeps: bool = True,
    ) -> None:
        self.spans, self.num_started = Spans(), 0
        self.slots = {str(n): {role: f"{role}-{n}" for role in roles} for n in range(num_slots)}
        self.engines: dict[str, Spoken] = {}  # the processes, by the name under which each was started
        for role in roles:
            self.engines |= {names[role]: Spoken(role) for names in self.slots.values()}
        for names in self.slots.values() if sleeps else ():
            for role in roles[1:]:
                self.engines[names[role]].awake = False
        self.routers = {
            role: Router(
                role,
                {name: engine for name, engine in self.engines.items() if engine.role == role},
                self.spans,
                Continuation(decode=lambda ids: " ".join(map(str, ids)), seed_after=unmoved),
            )
            for role in roles
        }
        config = SyncConfig(deadline_s=20)
        self.learners = {"policy": CountingLearner("policy", step_s=0.5, bucket_s=0.3)}
        self.syncs = {role: WeightSync(learner, PROBE, config) for role, learner in self.learners.items()}
        brings: dict[str, BringCurrent] = dict.fromkeys(roles, need_no_weights)
        brings |= {role: sync.catch_up for role, sync in self.syncs.items()}
        self.pool = ElasticPool(
            "engines",
            self.slots,
            {
                role: ElasticRole(
                    router=self.routers[role],
                    bring_current=brings[role],
                    sleeps=sleeps,
                    block_pushes=self.syncs[role].block_pushes if role in self.syncs else nullcontext,
                )
                for role in roles
            },
            self.spans,
        )
        for router in self.routers.values():
            router.max_deaths_per_request = 1000
        self.health = [
            RoleHealth(
                role,
                router,
                self.start,
                HealthConfig(max_replacements=1000, check_every_s=1.0),
                functools.partial(self.pool.bring_current, role),
                self.spans,
            )
            for role, router in self.routers.items()
        ]

    async def start(self, name: str) -> Engine:
        await asyncio.sleep(START_S)
        self.num_started += 1
        engine = self.engines[name] = Spoken(name.partition("-")[0])
        return engine

    async def push(self, version: int, role: str = "policy") -> None:
        await push_to_living(self.syncs[role], self.routers[role], version)

    async def ask(self, role: str, number: int, tokens: int) -> Completion:
        context = RequestContext(request_id=f"{role}/{number}", group_id=f"g{number // 4}", role=role)
        completion = await self.routers[role].generate((), SamplingParams(max_new_tokens=tokens), context)
        assert completion.token_ids == tuple(range(tokens)), "altered on its way"
        assert len(completion.logprobs) == tokens
        ends = [(span.start, span.end) for span in completion.versions]
        assert [0, *(end for _, end in ends)] == [*(start for start, _ in ends), tokens], "spans with gaps"
        return completion

    def serving(self, role: str) -> set[str]:
        return set(self.routers[role].members.serving)


def on_virtual_clock(make: Callable[[], Bench], main: Callable[[Bench], Coroutine[object, object, None]]) -> Bench:
    async def go() -> Bench:
        bench = make()
        health = {f"health of {health.role}": health.run() for health in bench.health}
        await run_until(main(bench), balance=bench.pool.run(), **health)
        return bench

    return run_virtually(go)


def test_the_first_judgement_takes_a_slot_and_the_last_rollout_gives_the_others() -> None:
    async def main(bench: Bench) -> None:
        await bench.push(0)
        rollouts = [asyncio.create_task(bench.ask("policy", n, 20 + 40 * (n == 0))) for n in range(32)]
        await asyncio.sleep(0.5)
        assert len(bench.serving("policy")) == 4
        judgements = [asyncio.create_task(bench.ask("grm", n, 100)) for n in range(64)]
        await asyncio.sleep(1.0)
        assert bench.serving("grm")
        await asyncio.gather(*rollouts)
        await asyncio.sleep(3.0)
        assert len(bench.serving("grm")) == 4
        await asyncio.gather(*judgements)
        await asyncio.sleep(5.0)
        assert len(bench.serving("policy")) == 4, "work starts there"

    bench = on_virtual_clock(lambda: Bench(4), main)
    assert set(bench.pool.moves) == {"policy->grm", "grm->policy"}
    assert ("engines 0", "switch policy->grm") in bench.spans.seen or len(bench.pool.moves) == 2
    lanes = {lane for lane, name in bench.spans.seen if name.startswith("switch ")}
    assert lanes <= {f"engines {n}" for n in range(4)}


def test_slots_go_from_one_judging_model_to_another_as_the_work_does() -> None:
    async def main(bench: Bench) -> None:
        await bench.push(0)
        for role, other in (("grm", "safety"), ("safety", "grm")):
            work = [asyncio.create_task(bench.ask(role, 100 * len(seen) + n, 100)) for n in range(64)]
            await asyncio.sleep(4.0)
            seen.append({name: len(bench.serving(name)) for name in THREE})
            await asyncio.sleep(1.0)
            work += [asyncio.create_task(bench.ask(other, 1000 + 100 * len(seen), 5))]
            await asyncio.gather(*work)

    seen: list[dict[str, int]] = []
    bench = on_virtual_clock(lambda: Bench(4, roles=THREE), main)
    assert seen[0]["grm"] == 4
    assert seen[1]["safety"] >= 3
    assert bench.pool.moves["grm->safety"] >= 3


def test_requests_of_a_leaving_slot_continue_elsewhere_with_their_tokens() -> None:
    async def main(bench: Bench) -> None:
        await bench.push(0)
        long = [asyncio.create_task(bench.ask("policy", 4 * n, 300)) for n in range(2)]
        await asyncio.sleep(5.0)
        judging = asyncio.create_task(bench.ask("grm", 0, 400))
        began_s = asyncio.get_running_loop().time()
        await asyncio.gather(*long)
        assert asyncio.get_running_loop().time() - began_s < 28, "what was sampled was sampled again"
        await judging

    bench = on_virtual_clock(lambda: Bench(2), main)
    asked = Counter(request for engine in bench.engines.values() for request, _ in engine.served)
    assert sorted(asked.values()) == [1, 1, 2]


def test_an_engine_that_does_not_let_its_requests_go_is_buried_and_its_slot_moves() -> None:
    class Deaf(Spoken):
        async def abort(self, request_id: str) -> None:
            if request_id.startswith("policy/"):
                await asyncio.Event().wait()
            await super().abort(request_id)

    async def main(bench: Bench) -> None:
        await bench.push(0)
        for engine in bench.routers["policy"].members.alive.values():
            engine.__class__ = Deaf  # type: ignore[assignment]
        rollouts = [asyncio.create_task(bench.ask("policy", n, 20_000)) for n in range(8)]
        await asyncio.sleep(1.0)
        await asyncio.gather(*(bench.ask("grm", n, 20) for n in range(8)))
        assert 60 < asyncio.get_running_loop().time() < 90
        for rollout in rollouts:
            rollout.cancel()

    bench = on_virtual_clock(lambda: Bench(2), main)
    assert bench.pool.moves["policy->grm"] >= 1


def test_one_slot_alternates_between_both_roles_and_a_push_calls_it_back() -> None:
    async def main(bench: Bench) -> None:
        await bench.push(0)
        for version in range(1, 4):
            await asyncio.gather(*(bench.ask("policy", 10 * version + n, 20) for n in range(4)))
            await asyncio.gather(*(bench.ask("grm", 10 * version + n, 20) for n in range(4)))
            assert not bench.serving("policy")
            await bench.learners["policy"].step()
            await bench.push(version)
            assert bench.engines["policy-0"].version == version

    bench = on_virtual_clock(lambda: Bench(1), main)
    assert bench.pool.moves == {"policy->grm": 3, "grm->policy": 3}


WAYS = ({"sleeps": False}, {"sleeps": True})


@pytest.mark.parametrize(("seed", "roles"), [*((seed, ROLES) for seed in range(16)), *((n, THREE) for n in range(8))])
def test_under_random_work_pushes_and_deaths_all_is_answered_once_and_under_current_weights(
    seed: int, roles: tuple[str, ...]
) -> None:
    """There may be fewer slots than roles."""
    rng = random.Random(seed)
    version_when_asked: dict[str, int] = {}

    async def one(bench: Bench, role: str, number: int) -> None:
        await asyncio.sleep(rng.uniform(0, 40))
        version_when_asked[f"{role}/{number}"] = pushed[role]
        await bench.ask(role, number, rng.randint(1, 120))
        answered[f"{role}/{number}"] += 1

    async def train(bench: Bench, role: str) -> None:
        for version in range(1, 9):
            await asyncio.sleep(rng.uniform(1, 6))
            await bench.learners[role].step()
            await bench.push(version, role)
            pushed[role] = version

    async def kill(bench: Bench) -> None:
        for _ in range(4):
            await asyncio.sleep(rng.uniform(2, 10))
            name = rng.choice(sorted(bench.engines))
            bench.engines[name].die("killed by signal 9")

    async def main(bench: Bench) -> None:
        for role in bench.learners:
            await bench.push(0, role)
        asks = [one(bench, role, n) for n in range(60) for role in roles]
        async with asyncio.timeout(2000):
            await asyncio.gather(kill(bench), *(train(bench, role) for role in bench.learners), *asks)

    pushed, answered = dict.fromkeys(roles, 0), Counter[str]()
    bench = on_virtual_clock(lambda: Bench(rng.randint(1, 4), roles=roles, **WAYS[seed % len(WAYS)]), main)
    assert len(answered) == 60 * len(roles)
    assert set(answered.values()) == {1}
    for engine in bench.engines.values():
        assert all(version >= version_when_asked[request] for request, version in engine.served)
    assert all(not router.load.num_requests for router in bench.routers.values())
    assert sum(bench.pool.slots_by_role.values()) == len(bench.slots)


def test_an_engine_that_dies_while_it_rests_is_replaced_and_rests() -> None:
    async def main(bench: Bench) -> None:
        await bench.push(0)
        work = [asyncio.create_task(bench.ask("policy", n, 200)) for n in range(4)]
        await asyncio.sleep(1.0)
        bench.engines["grm-1"].die("killed by signal 9")
        await asyncio.sleep(8.0)
        assert "grm-1" in bench.routers["grm"].members.alive
        assert not bench.serving("grm")
        await asyncio.gather(*work, bench.ask("grm", 0, 10))

    bench = on_virtual_clock(lambda: Bench(2, sleeps=False), main)
    assert [health.num_replaced for health in bench.health] == [0, 1]


def test_clock_of_answers_pauses_while_a_role_has_no_slot() -> None:
    async def main(bench: Bench) -> None:
        loop, clock = asyncio.get_running_loop(), ActiveClock()
        bench.pool.clocks["grm"].add(clock)
        began = clock.now()
        await bench.push(0)
        assert loop.time() > 0
        assert clock.now() == began, "the policy has all slots"
        rollouts = [asyncio.create_task(bench.ask("policy", n, 60)) for n in range(2)]
        await bench.ask("grm", 0, 20)
        assert 2.0 <= clock.now() - began < 2.3, "what it took a slot to come was counted"
        await asyncio.gather(*rollouts)

    on_virtual_clock(lambda: Bench(1), main)


def test_an_engine_that_comes_back_to_a_slot_that_left_it_sleeps() -> None:
    """It waits for a push; meanwhile its slot moves to the judge."""

    async def main(bench: Bench) -> None:
        await bench.push(0)
        bench.engines["policy-0"].die("killed by signal 9")
        await bench.learners["policy"].step()
        await asyncio.sleep(5.0)
        assert "policy-0" in bench.syncs["policy"].arrivals
        judging = [asyncio.create_task(bench.ask("grm", n, 150)) for n in range(8)]
        await asyncio.sleep(10.0)
        assert "grm-0" in bench.serving("grm")
        await bench.push(1)
        await asyncio.sleep(1.0)
        assert "policy-0" in bench.routers["policy"].members.alive
        assert "policy-0" not in bench.serving("policy")
        assert not bench.engines["policy-0"].awake
        await asyncio.gather(*judging)

    on_virtual_clock(lambda: Bench(2), main)


def test_requests_that_crowd_one_slot_go_to_another_that_idles() -> None:
    async def main(bench: Bench) -> None:
        await bench.push(0)
        await asyncio.gather(*(bench.ask("policy", n, 100) for n in range(4)))

    bench = on_virtual_clock(lambda: Bench(4), main)
    serving = {name for name, engine in bench.engines.items() if engine.served}
    assert serving == {f"policy-{n}" for n in range(4)}, "siblings stayed where the first one was"


def test_an_engine_that_missed_no_push_needs_none_to_serve_again() -> None:
    async def main(bench: Bench) -> None:
        await bench.push(0)
        router, engine = bench.routers["policy"], bench.engines["policy-0"]
        began_s = asyncio.get_running_loop().time()
        report = await bench.syncs["policy"].catch_up(
            "policy-0", engine, lambda: router.members.activate("policy-0", engine)
        )
        assert (report.num_bytes, asyncio.get_running_loop().time()) == (0, began_s)

    on_virtual_clock(lambda: Bench(1), main)


def test_the_embedded_engine_draws_after_a_move_what_it_would_have_drawn_unmoved() -> None:
    path = resolve_model("tiny://policy")
    renderer = Renderer.load(path, None)
    prompt = tuple(range(5, 25))
    params = SamplingParams(max_new_tokens=100, seed=11)

    async def drawn(move: bool) -> Completion:
        engines = {
            f"policy-{n}": EmbeddedEngine(EngineSpec(path=path, role="policy"), EmbeddedConfig()) for n in range(2)
        }
        continuation = Continuation(decode=renderer.decode, seed_after=unmoved)
        router = Router("policy", engines, continuation=continuation)
        begun = asyncio.Event()
        context = RequestContext(request_id="r", group_id="g", role="policy")
        answer = asyncio.create_task(router.generate(prompt, params, context, begun.set))
        try:
            await begun.wait()
            if move:
                await router.migrate("policy-0")
            return await answer
        finally:
            for engine in engines.values():
                engine.close()

    still, moved = asyncio.run(drawn(False)), asyncio.run(drawn(True))
    assert (moved.token_ids, moved.text, moved.finish_reason) == (still.token_ids, still.text, still.finish_reason)
    assert moved.logprobs == pytest.approx(still.logprobs, abs=1e-4)
    assert moved.versions == still.versions


def test_an_engine_that_sleeps_and_frees_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Pretender(Spoken):
        async def sleep(self) -> int:
            await super().sleep()
            return 0

    async def main() -> None:
        await put_to_sleep(Router("grm", {"grm-0": Spoken("grm"), "grm-1": Pretender("grm")}))

    asyncio.run(main())
    assert [record.message.split()[0] for record in caplog.records if record.levelname == "WARNING"] == ["grm-1"]


def test_an_engine_falls_asleep_while_no_learner_takes_memory_of_its_device() -> None:
    """vLLM's sleep fails if less is free after it than before."""
    still, slept = [0], []

    @asynccontextmanager
    async def memory_still() -> AsyncIterator[None]:
        await asyncio.sleep(0.5)  # a micro-batch ends
        still[0] += 1
        yield
        still[0] -= 1

    async def main(bench: Bench) -> None:
        bench.pool._roles = {
            role: replace(elastic, memory_still=memory_still) for role, elastic in bench.pool._roles.items()
        }
        for engine in bench.engines.values():
            engine.sleep = functools.partial(noted, engine.sleep)  # type: ignore[method-assign]
        await bench.push(0)
        await asyncio.gather(*(bench.ask("policy", n, 20) for n in range(4)))
        await asyncio.gather(*(bench.ask("grm", n, 20) for n in range(4)))

    async def noted(sleep: Callable[[], Coroutine[object, object, int]]) -> int:
        slept.append(still[0])
        return await sleep()

    on_virtual_clock(lambda: Bench(1), main)
    assert slept and all(slept)
