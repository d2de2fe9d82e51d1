"""A run on a virtual clock, with the real pipeline, admission, groups, routers, judge and batches. Only engines and
learner take time instead of working, and the driver takes the time it is given. Uses no disk and no process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from grmpipe.capacity.cost import Costs
from grmpipe.capacity.lower_bound import CRITIC, DRIVER, LEARNER, POLICY
from grmpipe.capacity.plan.work import policy_passes
from grmpipe.capacity.shared_cores import shared_by
from grmpipe.capacity.simulate.driver import SimulatedDriver
from grmpipe.capacity.simulate.scripts import FIRST_SCORE, IDS_APART, ModelWriter, Writer
from grmpipe.capacity.simulate.simulated_learner import SimulatedRanks
from grmpipe.capacity.simulate.stages import Workload, flow_of, make_judge, make_play, written
from grmpipe.capacity.simulate.step_bound import Bound, Needs, bound_of
from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.config.roles import resolve_engine
from grmpipe.envs.episode_slots import EpisodeSlots
from grmpipe.pipeline.interfaces import PipelineComponents, StepReport
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.stall_times import StallTimes
from grmpipe.run.build.compose_pipeline import Learners, compose
from grmpipe.train.critic.critic import Critic
from grmpipe.train.critic.critic_group import CriticGroup
from grmpipe.train.learner.learner_group import LearnerGroup
from grmpipe.train.learner.time_shared_learner import TimeSharedLearnerGroup
from models.engines.simulated.simulated_engine import SimulatedEngine
from models.engines.simulated.simulated_rate import SharedDevice
from models.types import Engine
from scheduler.events import EventSink, NoEvents
from scheduler.gc_tuning import infrequent_gc
from scheduler.placement import Placement
from scheduler.routing.migration import Continuation
from scheduler.routing.router import Router
from scheduler.slots.elastic import ElasticPool, ElasticRole
from scheduler.slots.time_share import SharedRole, TimeShare
from scheduler.supervise import run_until
from scheduler.weights.weight_sync import WeightSync

PROBE = (1, 2)
PRINCIPLES = "/principles"  # of a workload's lengths: shared principles, of all judges


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One optimizer step. busy_s: role -> seconds of work since the beginning, all its processes together; includes the
    driver if requests cost it time.
    """

    ended_s: float
    step_s: float
    busy_s: Mapping[str, float]
    staleness: int  # of its oldest group
    stalls: StallTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The result of a simulation. Means are over `settled`: the steps between the filling and the draining of the
    pipeline.

    busy:  role -> share of the time in which its processes worked.
    """

    steps: tuple[SimulatedStep, ...]
    settled: range
    step_s: float
    busy: Mapping[str, float]
    bound: Bound
    max_staleness: int
    dropped: Mapping[str, int]  # groups by cause
    failed_judgements: Mapping[str, int]
    moves: Mapping[str, int]  # of elastic slots
    stalls: StallTimes  # sum over `settled`

    @property
    def times_bound(self) -> float:
        return self.step_s / self.bound.step_s


def simulate(
    workload: Workload, placement: Placement, costs: Costs, num_steps: int, events: EventSink | None = None
) -> SimulatedRun:
    """Simulate a run. Uses its own event loop, so it can't be called within one. Deterministic: equal arguments give
    equal results.
    """
    with infrequent_gc():
        return run_virtually(lambda: Simulation(workload, placement, costs, num_steps, events or NoEvents()).run())


@dataclass(slots=True)
class Simulation:
    """A pipeline with its surroundings, for one run."""

    workload: Workload
    placement: Placement
    costs: Costs
    num_steps: int
    events: EventSink
    engines: dict[str, list[SimulatedEngine]] = field(init=False)
    devices: dict[str, SharedDevice] = field(init=False)  # name of a seat -> its device
    driver: SimulatedDriver = field(init=False)
    ranks: SimulatedRanks = field(init=False)
    needs: Needs = field(init=False)
    critic: Critic | None = field(init=False, default=None)
    critic_ranks: SimulatedRanks | None = field(init=False, default=None)
    pipeline: Pipeline = field(init=False)
    share: TimeShare | None = field(init=False, default=None)  # the time-shared pool of the learner
    steps: list[SimulatedStep] = field(default_factory=list)
    least_s: dict[str, float] = field(default_factory=dict)  # by role, up to the last step: see `_close_needs`

    async def run(self) -> SimulatedRun:
        """Run on the running loop: a virtual one, or a real one for a run in real time."""
        parts, pools = self.assemble()
        await parts.push_weights(0)
        self.pipeline = Pipeline(parts, flow_of(self.workload.config, self.num_steps), self._after_step)
        if self.share is not None:
            self.share.clocks.add(self.pipeline.clock)
        loops = {f"pool {pool.name}": pool.run() for pool in pools}
        values = {"values": self.critic.value_cache.run()} if self.critic is not None else {}
        await run_until(self.pipeline.run(), **loops, **values)
        return self._result(pools)

    def assemble(self) -> tuple[PipelineComponents, list[ElasticPool]]:
        """The components of the pipeline, and the pools whose slots move."""
        self.devices = shared_devices(self.placement, self.costs.cores)
        self.driver = SimulatedDriver(self.costs.driver_request_s, self.devices.get(DRIVER))
        first, *others = self.placement.seats[LEARNER]
        cp = self.workload.config.train.parallel.cp
        passes = policy_passes(self.workload.config)
        self.ranks = SimulatedRanks(
            1 + len(others),
            self.costs.learner,
            self.costs.sync_s,
            self.devices.get(first.name),
            self.costs.switch_s,
            cp,
            passes.reference_in_loss,
        )
        self.critic = self._critic()
        self.engines = {}
        routers = {role: self._start(role) for role in self.costs.engines}
        learner = TimeSharedLearnerGroup(self.ranks, cp)
        sync = WeightSync(learner, PROBE, self.workload.config.sync)
        pools = self._elastic_pools(routers, sync)
        if sharing := self.placement.time_sharing_roles:
            roles = {
                role: SharedRole(router=routers[role], sleeps=False, is_pushed_to=role == POLICY) for role in sharing
            }
            self.share = TimeShare(first.pool, roles, learner, self.events)
        self.needs = self._needs()
        return self._parts(routers, learner, sync), pools

    def _critic(self) -> Critic | None:
        """The critic: the real driver side, with ranks that only take time."""
        config, speed = self.workload.config, self.costs.critic
        if speed is None:
            return None
        first, *others = self.placement.seats[CRITIC]
        cp = config.critic.parallel.cp
        self.critic_ranks = SimulatedRanks(1 + len(others), speed, 0.0, self.devices.get(first.name), cp=cp)
        group = CriticGroup(self.critic_ranks, self.events, cp)
        return Critic(group, config.critic, config.train, config.algorithm, config.rollout.max_new_tokens)

    # -- construction --------------------------------------------------------------------------------------------------

    def _start(self, role: str) -> Router:
        """A role's engines behind the real router."""
        writer, cached = self._writer(role), resolve_engine(role, self.workload.config).caches_prompts
        engines: dict[str, Engine] = {}
        self.engines[role] = []
        for seat in self.placement.seats[role]:
            device = self.devices.get(seat.name)
            engine = SimulatedEngine(role, writer, speed=self.costs.engines[role], prefix_cache=cached, device=device)
            self.engines[role].append(engine)
            engines[seat.name] = engine
        elastic = self.placement.elastic_slots(self.placement.seats[role][0].pool)
        interrupted = elastic or role in self.placement.time_sharing_roles
        continuation = Continuation(decode=writer.decode, seed_after=lambda seed, num_sampled: seed)
        return Router(role, engines, self.events, continuation if interrupted else None)

    def _writer(self, role: str) -> ModelWriter:
        config, lengths = self.workload.config, self.workload.lengths
        asking = config.judging.asking(role)
        return ModelWriter(
            turns=Writer(lengths=lengths[POLICY], seed=config.seed) if role == POLICY else None,
            judges={name: self._judgements(name, FIRST_SCORE + n * IDS_APART) for n, name in enumerate(asking)},
        )

    def _judgements(self, name: str, first_id: int) -> Writer:
        """The writer of a judge's judgements."""
        config, judge = self.workload.config, self.workload.config.judging.judges[name]
        return Writer(
            lengths=self.workload.lengths[name],
            seed=config.seed,
            scale=judge.scale,
            boxed=written(judge).parser == "boxed",
            num_scores=judge.responses_shown(config.train.group_size),
            unparseable_share=config.simulate.unparseable_share,
            principles=self.workload.lengths.get(PRINCIPLES),
            first_id=first_id,
        )

    def _elastic_pools(self, routers: Mapping[str, Router], sync: WeightSync) -> list[ElasticPool]:
        pools = []
        for name in self.placement.pools:
            if slots := self.placement.elastic_slots(name):
                roles = {role: self._elastic_role(role, routers[role], sync) for role in next(iter(slots.values()))}
                balance = self.workload.config.slots.balance
                pools.append(ElasticPool(name, slots, roles, balance, self.events))
        return pools

    def _elastic_role(self, role: str, router: Router, sync: WeightSync) -> ElasticRole:
        """An elastic role with simulated costs of a switch; the policy's new engines catch up as in a real run."""
        switch_s = self.costs.switch_s

        async def bring_current(name: str, engine: Engine, admit: Callable[[], None]) -> None:
            await asyncio.sleep(switch_s)
            if role == POLICY:
                await sync.catch_up(name, engine, admit)
            else:
                admit()

        return ElasticRole(router=router, bring_current=bring_current, max_rows=self.costs.engines[role].max_rows)

    def _needs(self) -> Needs:
        """The lower bound's journal."""
        config = self.workload.config
        return Needs(
            self.costs,
            policy_passes(config),
            prefix_sharing=config.train.prefix_sharing,
            critic_updates=config.critic.updates(config.algorithm, config.train),
        )

    def _most_rows(self, role: str) -> int:
        """The most rows that can be in an engine's batch: limited by the engine, and by what may be in flight."""
        train, judging = self.workload.config.train, self.workload.config.judging
        played = train.group_size * (role == POLICY)
        judged = sum(judge.judgements_of_group(train.group_size) for judge in judging.asking(role).values())
        in_flight = (train.max_staleness + 1) * train.groups_per_batch * (played + judged)
        share = -(-in_flight // len(self.placement.seats[role]))
        return max(1, min(self.costs.engines[role].max_rows, share))

    def _parts(self, routers: Mapping[str, Router], learner: LearnerGroup, sync: WeightSync) -> PipelineComponents:
        config, policy = self.workload.config, routers[POLICY]
        return compose(
            config,
            Learners(policy=learner, sync=sync, engines=policy, critic=self.critic, share=self.share),
            prompts=self.workload.prompts,
            too_long=lambda prompt: False,
            slots=EpisodeSlots(),
            play=make_play(self.workload, policy, self.driver),
            judge=make_judge(self.workload, routers, self.driver),
            journal=self.needs,
            events=self.events,
        )

    # -- counting ------------------------------------------------------------------------------------------------------

    async def _after_step(self, report: StepReport) -> None:
        self._close_needs(report.step)
        busy_s = {role: sum(engine.busy_s for engine in engines) for role, engines in self.engines.items()}
        self.steps.append(
            SimulatedStep(
                ended_s=asyncio.get_running_loop().time(),
                step_s=report.stalls.steps_s,
                busy_s=busy_s | self._learning_busy_s() | self._driver_busy_s(),
                staleness=max(report.step - 1 - group.version for group in report.groups),
                stalls=report.stalls,
            )
        )

    def _close_needs(self, step: int) -> None:
        """Close the step for the bound, with what was done since the step before."""
        so_far = {
            role: sum(engine.least_busy_s(self._most_rows(role)) for engine in engines)
            for role, engines in self.engines.items()
        }
        if self.critic_ranks is not None:
            so_far[CRITIC] = self.critic_ranks.busy_s
        so_far |= self._driver_busy_s()
        self.needs.close_step(step, {role: least - self.least_s.get(role, 0.0) for role, least in so_far.items()})
        self.least_s = so_far

    def _learning_busy_s(self) -> dict[str, float]:
        learner = {LEARNER: self.ranks.busy_s}
        return learner if self.critic_ranks is None else learner | {CRITIC: self.critic_ranks.busy_s}

    def _driver_busy_s(self) -> dict[str, float]:
        return {DRIVER: self.driver.busy_s} if self.costs.driver_request_s else {}

    def _result(self, pools: Sequence[ElasticPool]) -> SimulatedRun:
        train = self.workload.config.train
        settled = settled_steps(len(self.steps), train.max_staleness)
        inside = [self.steps[index] for index in settled]
        before = self.steps[settled.start - 1] if settled.start else None
        began_s = before.ended_s if before else inside[0].ended_s - inside[0].step_s
        seconds = inside[-1].ended_s - began_s
        busy_s = {role: busy - (before.busy_s[role] if before else 0.0) for role, busy in inside[-1].busy_s.items()}
        counts = dict.fromkeys(busy_s, 1) | {role: len(engines) for role, engines in self.engines.items()}
        return SimulatedRun(
            steps=tuple(self.steps),
            settled=settled,
            step_s=seconds / len(settled),
            busy={role: busy_s[role] / (seconds * count) if seconds else 0.0 for role, count in counts.items()},
            bound=bound_of(
                [self.needs.steps[index + 1] for index in settled],
                self.placement,
                self.costs,
                train.max_staleness,
                min(train.max_staleness, settled.start),
            ),
            max_staleness=max(step.staleness for step in self.steps),
            dropped=dict(self.pipeline.ledger.dropped),
            failed_judgements=dict(self.pipeline.counters.total_so_far().judging.failed),
            moves={move: count for pool in pools for move, count in pool.moves.items()},
            stalls=sum((step.stalls for step in inside), StallTimes()),
        )


def settled_steps(num_steps: int, max_staleness: int) -> range:
    """The steps without those in which the pipeline fills and drains: steps overlap with as many as staleness
    allows.
    """
    edge = max_staleness + 1 if max_staleness and num_steps > 2 * (max_staleness + 1) else 0
    return range(edge, num_steps - edge)


def shared_devices(placement: Placement, cores: int) -> dict[str, SharedDevice]:
    """Name of a seat, or of the driver -> the device it shares with others. A process on several GPUs counts on the
    first.
    """
    devices: dict[str, SharedDevice] = {}
    for shared in shared_by(placement, cores):
        device = SharedDevice(shared.capacity, shared.context_switch_cost)
        devices |= {seat.name: device for seat in shared.seats if seat.name not in devices}
        if shared.is_host:
            devices[DRIVER] = device
    return devices
