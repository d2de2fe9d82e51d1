"""Admission, groups, routers, pushes and the balancer together, with random delays, drops, deaths and moves: the
guarantees of the real pipeline, on a virtual clock. Engines and the learner only take time.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.envs.play import RolloutRequest, play_single_turn
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.models.checksum import checksum
from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
from grmpipe.models.types import (
    Completion,
    Engine,
    GroupLink,
    InlineBytes,
    Message,
    OnDevice,
    RequestContext,
    SamplingParams,
    ToolSpec,
    WeightBucket,
    WeightReceipt,
    WeightTensor,
)
from grmpipe.pipeline.health import JudgeHealth, ServiceHealth
from grmpipe.pipeline.interfaces import FlowConfig, PipelineComponents, StepReport, TrainedBatch
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.scheduler.events import NoEvents
from grmpipe.scheduler.routing.router import Continuation, Router
from grmpipe.scheduler.run_together import run_until
from grmpipe.scheduler.slots.balance import Pool, Slot
from grmpipe.scheduler.slots.elastic import CHECK_EVERY_S, ElasticPool, ElasticRole, spare
from grmpipe.scheduler.slots.engine_replacement import HealthConfig, RoleHealth, need_no_weights, push_to_living
from grmpipe.scheduler.slots.time_share import SharedRole, TimeShare
from grmpipe.scheduler.weights.weight_push import SyncConfig, SyncReport, WeightMismatch
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.train.learner.time_shared_learner import TimeSharedTrainer, begin_learner_phase
from grmpipe.types import GroupEnd, JudgedGroup, JudgeReport, Prompt, RewardSpan, Rollout, Verdict

TOKENS_PER_S, HUNG = 10, 20_000
LONGEST = 400  # tokens of what ends: in time for the longer deadline, a rollout and then its judgement
SAMPLED_EVERY_S = 0.1
ROUNDING_S = 1e-6
WORTH_SWITCHES = 2.5  # the balancer asks for 2: what it expects at its own moments isn't what is expected between them
PROMPT_IDS = (1, 2, 3)
ROLES = ("policy", "grm")


@dataclass(frozen=True, kw_only=True)
class World:
    """A run and its events. deaths: (seconds after the last one, which engine)."""

    seed: int = 0
    num_slots: int = 2
    sharing: str = "elastic"  # of the slots: none, elastic, time
    sleeps: bool = True
    max_staleness: int = 1
    groups_per_batch: int = 2
    group_size: int = 3
    num_steps: int = 3
    num_judgements: int = 2
    deadline_s: float = 120.0
    typical_tokens: tuple[int, int] = (40, 40)  # of a rollout, of a judgement
    hung_share: float = 0.0  # of requests that never end
    deaths: tuple[tuple[float, int], ...] = ()
    corrupts: int | None = None  # the version whose weights arrive damaged


worlds = st.builds(
    World,
    seed=st.integers(0, 999),
    num_slots=st.integers(1, 4),
    sharing=st.sampled_from(["none", "elastic", "elastic", "time"]),
    sleeps=st.booleans(),
    max_staleness=st.integers(0, 2),
    groups_per_batch=st.integers(1, 3),
    group_size=st.integers(2, 4),
    num_steps=st.integers(2, 4),
    num_judgements=st.integers(1, 3),
    deadline_s=st.sampled_from([40.0, 120.0]),
    typical_tokens=st.tuples(st.sampled_from([10, 80]), st.sampled_from([10, 80])),
    hung_share=st.sampled_from([0.0, 0.0, 0.05]),
    deaths=st.lists(st.tuples(st.floats(0, 25), st.integers(0, 7)), max_size=4).map(tuple),
)


def said(request_id: str, start: int, end: int) -> tuple[int, ...]:
    """The tokens of a request, the same on any engine: no engine can leave out, duplicate or change a token
    unnoticed.
    """
    return tuple(hash((request_id, place)) % 50_000 for place in range(start, end))


class Spoken(SimulatedEngine):
    """An engine that continues a request where another engine stopped. Sleeps, wakes, dies, and may corrupt weights."""

    def __init__(self, role: str, world: World) -> None:
        super().__init__(role, self._write, tokens_per_s=TOKENS_PER_S)
        self.world, self.role = world, role
        self.awake = True
        self.begun: list[tuple[str, int]] = []  # (request, version at its beginning here)

    def _write(self, ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
        self._check_alive()
        assert self.awake, "asked in its sleep"
        name, before = context.request_id, context.num_sampled
        assert tuple(ids) == PROMPT_IDS + said(name, 0, before), "what was sampled elsewhere came altered"
        self.begun.append((name, self.version))
        return Script(token_ids=said(name, before, max(self._length(name, context.role), before + 1)), text="x")

    def _length(self, name: str, role: str) -> int:
        rng = random.Random(f"{self.world.seed}/{name}")
        if rng.random() < self.world.hung_share:
            return HUNG
        return min(1 + int(self.world.typical_tokens[role == "grm"] * rng.lognormvariate(0, 0.8)), LONGEST)

    async def begin_weights(self, link: GroupLink | None = None) -> None:
        self._check_alive()
        assert self.awake, "pushed to in its sleep"
        await super().begin_weights(link)

    async def commit_weights(self, version: int) -> WeightReceipt:
        receipt = await super().commit_weights(version)
        if version == self.world.corrupts:
            return replace(receipt, checksums=dict.fromkeys(receipt.checksums, "0" * 16))
        return receipt

    async def sleep(self) -> int:
        self._check_alive()
        assert not self._by_row, "sent to sleep with requests"
        self.awake = False
        return 1

    async def wake(self) -> None:
        await asyncio.sleep(0.3)
        self._check_alive()
        self.awake = True


@dataclass
class Learner:
    """A learner whose weights are its number of steps; remembers the batches."""

    rng: random.Random
    steps: list[list[JudgedGroup]] = field(default_factory=list)
    on_device: OnDevice = "everything"
    engines_awake: Callable[[], bool] = lambda: False  # that must sleep while it steps
    _taken: list[JudgedGroup] = field(default_factory=list)
    _hold: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take(self, group: JudgedGroup) -> None:
        self._taken.append(group)

    async def while_waiting(self) -> bool:
        assert self.on_device == "everything"
        return False

    async def step(self, batch: Sequence[JudgedGroup]) -> TrainedBatch:
        assert list(batch) == self._taken, "trained what it did not take"
        async with self._hold:
            assert self.on_device == "everything"
            await asyncio.sleep(self.rng.uniform(0.1, 3.0))
            assert not self.engines_awake(), "an engine is awake in the learner's phase"
            self.steps.append(self._taken)
            self._taken = []
        return TrainedBatch()

    async def discard(self) -> None:
        raise AssertionError("the prompts never end")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        async with self._hold:
            yield len(self.steps)

    async def keep_on_device(self, on_device: OnDevice) -> int:
        await asyncio.sleep(0.2)
        sizes = {"everything": 12, "weights": 4, "nothing": 0}
        self.on_device, before = on_device, self.on_device
        return sizes[before] - sizes[on_device]

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        assert self.on_device != "nothing"
        return (-1.0,) * (len(token_ids) - 1)

    async def connect(self, link: GroupLink | None) -> None:
        return None

    async def num_buckets(self) -> int:
        return 1

    async def num_fixed_buckets(self) -> int:
        return 0

    async def bucket(self, index: int) -> WeightBucket:
        await asyncio.sleep(0.3)
        data = np.full(8, len(self.steps), dtype=np.uint8)
        tensor = WeightTensor(name="all", dtype="float32", shape=(2,), checksum=checksum(data))
        return WeightBucket(tensors=(tensor,), payload=InlineBytes(data=(data,)))


class Prompts:
    def at(self, prompt_index: int) -> Prompt:
        return Prompt(
            prompt_id=f"p{prompt_index}", messages=(Message(role="user", content=f"question {prompt_index}"),)
        )


class Renderer:
    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        return PROMPT_IDS

    def extend(
        self, replies: Sequence[Message], tools: Sequence[ToolSpec] = (), *, ended: bool = True
    ) -> tuple[int, ...]:
        return PROMPT_IDS


class Run:
    """The pipeline with all its parts. A violated guarantee fails the run."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, random.Random(world.seed)
        places = range(world.num_slots)
        self.slots = {str(n): {role: f"{role}-{n}" for role in ROLES} for n in places}
        self.engines = {f"{role}-{n}": Spoken(role, world) for role in ROLES for n in places}
        resume = Continuation(decode=lambda ids: "x", seed_after=lambda seed, num_sampled: seed)
        self.routers = {role: Router(role, self.engines_of(role), None, resume) for role in ROLES}
        self.learner = Learner(self.rng)
        self.sync = WeightSync(self.learner, PROMPT_IDS, SyncConfig())
        self.pool = self.make_pool() if world.sharing == "elastic" else None
        self.share = self.make_share() if world.sharing == "time" else None
        self.health = [self.watch_over(role) for role in self.routers]
        self.pushed = -1
        self.pushed_when_asked: dict[str, int] = {}
        self.first_token_s: dict[str, float] = {}
        self.ends: Counter[str] = Counter()
        self.pipeline = Pipeline(self.parts(), self.flow(), self.after_step)
        for health in self.health:
            health.clocks.add(self.pipeline.clock)
        if self.share is not None:
            self.share.clocks.add(self.pipeline.clock)

    # -- construction --------------------------------------------------------------------------------------------------

    def make_pool(self) -> ElasticPool:
        sleeps = self.world.sleeps
        for name, engine in self.engines.items():
            engine.awake = not (sleeps and name.startswith("grm"))
        policy = ElasticRole(
            router=self.routers["policy"],
            bring_current=self.sync.catch_up,
            sleeps=sleeps,
            block_pushes=self.sync.block_pushes,
        )
        return ElasticPool(
            "all",
            self.slots,
            {"policy": policy, "grm": ElasticRole(router=self.routers["grm"], sleeps=sleeps)},
        )

    def engines_of(self, role: str) -> dict[str, Engine]:
        return {name: engine for name, engine in self.engines.items() if engine.role == role}

    def make_share(self) -> TimeShare:
        self.learner.on_device = "nothing"
        if self.world.sleeps:
            self.learner.engines_awake = lambda: any(
                self.engines[name].awake for router in self.routers.values() for name in router.members.alive
            )
        brings = {"policy": self.sync.catch_up, "grm": need_no_weights}
        roles = {
            role: SharedRole(
                router=router, bring_current=brings[role], sleeps=self.world.sleeps, is_pushed_to=role == "policy"
            )
            for role, router in self.routers.items()
        }
        return TimeShare("all", roles, self.learner)

    def watch_over(self, role: str) -> RoleHealth:
        bring = self.sync.catch_up if role == "policy" else need_no_weights
        if self.share is not None:
            bring = functools.partial(self.share.bring_current, role)
        if self.pool is not None:
            bring = functools.partial(self.pool.bring_current, role)
        self.routers[role].max_deaths_per_request = 100
        config = HealthConfig(max_replacements=100, check_every_s=1.0)
        return RoleHealth(role, self.routers[role], self.restart, config, bring)

    def parts(self) -> PipelineComponents:
        return PipelineComponents(
            prompts=Prompts(),
            too_long=lambda prompt: False,
            play=self.play,
            judge=PointwiseAdapter(self),
            judge_guard=JudgeHealth(
                ServiceHealth(
                    "judging",
                    max_failure_rate=1.0,
                    window=32,
                    pause_s=5.0,
                    counted="verdicts",
                    key="judge.max_failure_rate",
                )
            ),
            trainer=TimeSharedTrainer(self.learner, begin_learner_phase(self.share)) if self.share else self.learner,
            push_weights=self.push,
            journal=self,
            events=NoEvents(),
        )

    def flow(self) -> FlowConfig:
        world = self.world
        return FlowConfig(
            num_steps=world.num_steps, groups_per_batch=world.groups_per_batch, group_size=world.group_size,
            min_valid_siblings=2, max_staleness=world.max_staleness, group_deadline_s=world.deadline_s,
            rollout_concurrency=64, judge_concurrency=64, seed=world.seed,
        )  # fmt: skip

    # -- parts of the pipeline -----------------------------------------------------------------------------------------

    async def play(self, request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        self.pushed_when_asked[f"{request.group_id}/{request.sibling}/t0"] = self.pushed

        def began() -> None:
            self.first_token_s.setdefault(request.group_id, self.pipeline.clock.now())
            on_first_token()

        params = SamplingParams(max_new_tokens=HUNG)
        return await play_single_turn(request, prompt, self.routers["policy"], Renderer(), params, began)

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        async with asyncio.TaskGroup() as tasks:
            for index in range(self.world.num_judgements):
                name = f"{rollout.group_id}/{rollout.sibling}/j{index}"
                tasks.create_task(self.ask_grm(name, rollout.group_id, priority))
        span = RewardSpan(turn=0, start=0, end=1, value=0.5)
        verdict = Verdict(rewards=(span,), score=5.0, breakdown={}, score_std=1.0, num_judgements=1)
        return JudgeReport(verdict=verdict)

    async def ask_grm(self, name: str, group_id: str, priority: int) -> None:
        context = RequestContext(request_id=name, group_id=group_id, role="grm", priority=priority)
        check_whole(name, await self.routers["grm"].generate(PROMPT_IDS, SamplingParams(max_new_tokens=HUNG), context))

    async def push(self, version: int) -> SyncReport:
        push = functools.partial(push_to_living, self.sync, self.routers["policy"], version)
        report = await (self.share.push(push) if self.share else push())
        self.pushed = version
        serving = self.routers["policy"].members.serving
        have = [self.engines[name] for name in serving]
        assert all((engine.role, engine.version) == ("policy", version) for engine in have), (
            "guarantee 5: old weights serve"
        )
        return report

    async def after_step(self, report: StepReport) -> None:
        assert self.pipeline.ledger

    def rollout(self, prompt_index: int, prompt: Prompt, rollout: Rollout) -> None:
        check_whole(f"{rollout.group_id}/{rollout.sibling}/t0", rollout.turns[0].completion)
        self.check_deadline(rollout.group_id)

    def record_verdict(self, rollout: Rollout, report: JudgeReport) -> None:
        self.check_deadline(rollout.group_id)

    def group_ended(self, end: GroupEnd) -> None:
        self.ends[end.group_id] += 1

    # -- events --------------------------------------------------------------------------------------------------------

    async def restart(self, name: str) -> Engine:
        await asyncio.sleep(self.rng.uniform(0.5, 4.0))
        engine = self.engines[name] = Spoken(name.partition("-")[0], self.world)
        return engine

    async def kill(self) -> None:
        for after_s, which in self.world.deaths:
            await asyncio.sleep(after_s)
            names = sorted(self.engines)
            self.engines[names[which % len(names)]].die("killed by signal 9")
        await asyncio.Event().wait()

    # -- guarantees ----------------------------------------------------------------------------------------------------

    def check_deadline(self, group_id: str) -> None:
        """In active seconds. The deadline restarts with a group's first token."""
        if (began_s := self.first_token_s.get(group_id)) is not None:
            assert self.pipeline.clock.now() <= began_s + self.world.deadline_s + ROUNDING_S, "guarantee 2: outlived"

    async def look_at_slots(self) -> None:
        """Samples how long a slot idles while its pool has work for it."""
        idle_s, dearest_s = defaultdict[str, float](float), defaultdict[str, float](float)
        while self.pool is not None:
            await asyncio.sleep(SAMPLED_EVERY_S)
            view = self.pool.view()
            for slot in view.slots:
                if (cost_s := wasted_on(view, slot, self.routers[slot.role])) is None:
                    idle_s[slot.name] = dearest_s[slot.name] = 0.0
                    continue
                idle_s[slot.name] = min(idle_s[slot.name] + SAMPLED_EVERY_S, slot.idle_s)  # busy between two looks
                dearest_s[slot.name] = max(dearest_s[slot.name], cost_s)  # it is slower while others switch too
                limit_s = dearest_s[slot.name] + CHECK_EVERY_S + 2 * SAMPLED_EVERY_S
                assert idle_s[slot.name] <= limit_s, f"{slot} idles and there is work: {view}"
        await asyncio.Event().wait()

    async def go(self) -> None:
        async def main() -> None:
            await self.push(0)
            async with asyncio.timeout(1e5):
                await self.pipeline.run()

        loops = {health.role: health.run() for health in self.health} | {"death": self.kill()}
        if self.pool is not None:
            loops |= {"balance": self.pool.run(), "slots": self.look_at_slots()}
        await run_until(main(), **loops)
        for group_id in self.pipeline._buffer.groups:
            self.check_deadline(group_id)


def check_whole(name: str, completion: Completion) -> None:
    """Guarantees 5 and 7: every token once, as it should be, and by a known version."""
    assert completion.finish_reason == "stop"
    assert completion.token_ids == said(name, 0, completion.num_tokens), "altered on its way"
    assert len(completion.logprobs) == completion.num_tokens
    ends = [span.end for span in completion.versions]
    assert [0, *ends] == [*(span.start for span in completion.versions), completion.num_tokens], "spans with gaps"
    assert [span.version for span in completion.versions] == sorted(span.version for span in completion.versions)


def wasted_on(view: Pool, slot: Slot, router: Router) -> float | None:
    """The cost of a switch for an idle slot with work elsewhere: a request that another slot of its role can spare, or
    a role with more requests than slots, enough for more than WORTH_SWITCHES switches, while its own role has fewer.
    None: there is no such work, or the slot is changing its role.
    """
    if router.load[f"{slot.role}-{slot.name}"] or slot.able != frozenset(view.roles):
        return None
    (other,) = slot.able - {slot.role}
    goal, serving, cost_s = view.roles[other], view.num_serving(other), view.cost_s(slot.role, other)
    needless = view.roles[slot.role].requests < view.num_serving(slot.role)
    elsewhere = goal.requests > serving and goal.finish_s(serving) > WORTH_SWITCHES * cost_s and view.can_go(slot)
    return cost_s if (needless and elsewhere) or spare(router) is not None else None


def ran(world: World) -> Run:
    logging.disable(logging.WARNING)

    async def go() -> Run:
        run = Run(world)
        await run.go()
        return run

    try:
        return run_virtually(go)
    finally:
        logging.disable(logging.NOTSET)


@settings(max_examples=30)
@given(worlds)
def test_faults_break_no_guarantee(world: World) -> None:
    """Guarantees 2, 3, 5 and 7, and no slot idles next to work for longer than a switch and a check take."""
    run = ran(world)
    ledger, steps = run.pipeline.ledger, run.learner.steps
    assert ledger.submitted == ledger.trained + ledger.dropped.total() + ledger.in_flight
    assert ledger.trained == world.num_steps * world.groups_per_batch
    assert set(run.ends.values()) == {1}, "a group that ended twice"
    for version, groups in enumerate(steps):
        assert len(groups) == world.groups_per_batch
        tokens = [span.version for g in groups for r in g.rollouts for span in r.turns[0].completion.versions]
        assert version - world.max_staleness <= min(tokens), "guarantee 3: too old"
        assert max(tokens) <= version
    for engine in run.engines.values():
        began = [(name, version) for name, version in engine.begun if name in run.pushed_when_asked]  # rollouts
        assert all(version >= run.pushed_when_asked[name] for name, version in began), "guarantee 5: old weights serve"
    if run.share is not None:
        lends = run.learner.on_device == "weights"  # the run ended while an engine came, which gets them
        assert run.share.freed_bytes["learner"] == (8 if lends else 12), "it gives back all that it had"
    if not world.deaths and not world.hung_share and world.deadline_s > 100:
        assert not ledger.dropped, "nothing befell it"


@settings(max_examples=5)
@given(worlds, st.integers(0, 2))
def test_weights_that_arrive_damaged_stop_the_run(world: World, version: int) -> None:
    world = replace(world, corrupts=version, num_steps=3, hung_share=0.0)
    with pytest.raises(WeightMismatch, match=f"version {version}"):
        ran(world)
