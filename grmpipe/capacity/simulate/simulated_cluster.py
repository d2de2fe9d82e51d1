"""A run on a virtual clock, with the real pipeline, admission, groups, routers, judge and batches. Only engines and
learner take time instead of working, and the driver takes the time it is given.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grmpipe.capacity.cost import Costs, LearnerSpeed
from grmpipe.capacity.lower_bound import CRITIC, DRIVER, LEARNER, POLICY, busiest_slot_s, is_learning, is_on_cpu
from grmpipe.capacity.plan.work import policy_passes
from grmpipe.capacity.simulate.simulated_answers import CountingRenderer
from grmpipe.capacity.simulate.simulated_learner import SimulatedDriver, SimulatedRanks
from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.capacity.simulate.workload import Workload, make_flow, make_judge, make_play, make_writer
from grmpipe.config.run_config import RunConfig
from grmpipe.envs.episode_slots import EpisodeSlots
from grmpipe.models.engines.simulated.simulated_engine import SimulatedEngine
from grmpipe.models.engines.simulated.simulated_rate import SharedDevice
from grmpipe.models.types import Engine
from grmpipe.pipeline.interfaces import PipelineComponents, StepReport
from grmpipe.pipeline.pipeline import Pipeline
from grmpipe.pipeline.stall_times import StallTimes
from grmpipe.roles.roles import resolve_engine
from grmpipe.run.build.compose_pipeline import Learners, compose
from grmpipe.run.build.make_judge import make_teachers
from grmpipe.scheduler.events import EventSink, NoEvents
from grmpipe.scheduler.gc_tuning import infrequent_gc
from grmpipe.scheduler.placement import Placement
from grmpipe.scheduler.routing.router import Continuation, Router
from grmpipe.scheduler.run_together import run_until
from grmpipe.scheduler.slots.elastic import ElasticPool, ElasticRole
from grmpipe.scheduler.slots.engine_replacement import push_to_living
from grmpipe.scheduler.slots.time_share import SharedRole, TimeShare
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.train.critic.critic import Critic
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.train.learner.time_shared_learner import TimeSharedLearnerRanks
from grmpipe.types import GroupEnd, JudgeReport, Prompt, Rollout

PROBE = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least seconds of a step: the work of the busiest slot. No overlap beats it: what the processes of a slot did,
    they can't do faster one after the other. `loads_s`: of each process of a role.
    """

    step_s: float
    loads_s: Mapping[str, float]


def compute_bound(work_s: Mapping[str, float], placement: Placement, costs: Costs) -> Bound:
    """work_s: role -> seconds of work in a step, of all its engines together with their batches full, of each rank, of
    the driver. A push also stops the policy's engines.
    """
    loads = {
        role: seconds if is_learning(role) or role == DRIVER else seconds / len(placement.seats[role])
        for role, seconds in work_s.items()
    }
    paused, pushing = placement.seats[POLICY][0], placement.seats[LEARNER][0]
    on_cores = costs.cores and is_on_cpu(placement, paused)  # a paused process leaves its core to others
    if paused.pool != pushing.pool and not on_cores:  # on one slot a push counts once
        loads[POLICY] += costs.sync_s
    return Bound(step_s=busiest_slot_s(placement, loads, costs.cores), loads_s=loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One optimizer step. busy_s: role -> seconds of work since the beginning, all its processes together; includes the
    driver if requests cost it time. least_s: the same if batches had been full, and nothing computed twice.
    """

    ended_s: float
    step_s: float
    busy_s: Mapping[str, float]
    least_s: Mapping[str, float]
    staleness: int  # its oldest group's
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
    moves: Mapping[str, int]  # moves of elastic slots
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


class Simulation:
    """A pipeline with its surroundings, for one run."""

    def __init__(
        self, workload: Workload, placement: Placement, costs: Costs, num_steps: int, events: EventSink
    ) -> None:
        self._workload, self._config = workload, workload.config
        self._placement, self._costs, self._events = placement, costs, events
        self._num_steps = num_steps
        self._devices = find_shared_devices(placement, costs.cores)
        self._driver = SimulatedDriver(costs.driver_request_s, self._devices.get(DRIVER))
        self._engines: dict[str, list[SimulatedEngine]] = {}
        self._ranks: dict[str, SimulatedRanks] = {}  # the learner's and a critic's
        self._steps: list[SimulatedStep] = []

    async def run(self) -> SimulatedRun:
        """Run on the running loop: a virtual one, or a real one for a run in real time."""
        routers = {role: self._start_engines(role) for role in self._costs.engines}
        cp = self._config.train.parallel.cp
        learner = TimeSharedLearnerRanks(self._start_ranks(LEARNER, self._costs.learner, cp), cp)
        sync = WeightSync(learner, PROBE, self._config.sync)
        share, critic = self._time_share(routers, learner), self._start_critic()
        pools = self._elastic_pools(routers, sync)
        push = functools.partial(push_to_living, sync, routers[POLICY])
        learners = Learners(policy=learner, push=push, critic=critic, share=share)
        parts = self._compose(learners, routers)
        await parts.push_weights(0)
        began = self._step_end(0.0, 0, StallTimes())
        pipeline = Pipeline(parts, make_flow(self._config, self._num_steps), self._after_step)
        if share is not None:
            share.clocks.add(pipeline.clock)
        loops = {f"pool {pool.name}": pool.run() for pool in pools}
        values = {"values": critic.value_cache.run()} if critic is not None else {}
        await run_until(pipeline.run(), **loops, **values)
        return self._result(began, pipeline, pools)

    # -- construction --------------------------------------------------------------------------------------------------

    def _start_engines(self, role: str) -> Router:
        """A role's engines behind the real router."""
        writer, cached = make_writer(self._workload, role), resolve_engine(role, self._config).caches_prompts
        engines: dict[str, Engine] = {}
        self._engines[role] = []
        for seat in self._placement.seats[role]:
            device = self._devices.get(seat.name)
            engine = SimulatedEngine(role, writer, speed=self._costs.engines[role], prefix_cache=cached, device=device)
            self._engines[role].append(engine)
            engines[seat.name] = engine
        elastic = self._placement.elastic_slots(self._placement.seats[role][0].pool)
        interrupted = elastic or role in self._placement.time_sharing_roles
        continuation = Continuation(decode=writer.decode, seed_after=lambda seed, num_sampled: seed)
        return Router(role, engines, self._events, continuation if interrupted else None)

    def _start_ranks(self, role: str, speed: LearnerSpeed, cp: int) -> SimulatedRanks:
        """The ranks of the learner or a critic: their driver side is the real one."""
        seats, passes, learns = self._placement.seats[role], policy_passes(self._config), role == LEARNER
        self._ranks[role] = ranks = SimulatedRanks(
            len(seats),
            speed,
            self._costs.sync_s if learns else 0.0,
            self._devices.get(seats[0].name),
            self._costs.switch_s if learns else 0.0,
            cp,
            learns and passes.reference_in_loss,
        )
        return ranks

    def _start_critic(self) -> Critic | None:
        config, speed = self._config, self._costs.critic
        if speed is None:
            return None
        cp = config.critic.parallel.cp
        ranks = CriticLearnerRanks(self._start_ranks(CRITIC, speed, cp), self._events, cp)
        return Critic(ranks, config.critic, config.train, config.algorithm, config.rollout.max_new_tokens)

    def _time_share(self, routers: Mapping[str, Router], learner: TimeSharedLearnerRanks) -> TimeShare | None:
        """The time-shared pool of the learner."""
        roles = {
            role: SharedRole(router=routers[role], sleeps=False, is_pushed_to=self._config.models[role].plays)
            for role in self._placement.time_sharing_roles
        }
        pool = self._placement.seats[LEARNER][0].pool
        return TimeShare(pool, roles, learner, self._events) if roles else None

    def _elastic_pools(self, routers: Mapping[str, Router], sync: WeightSync) -> list[ElasticPool]:
        pools = []
        for name in self._placement.pools:
            if slots := self._placement.elastic_slots(name):
                roles = {role: self._elastic_role(role, routers[role], sync) for role in next(iter(slots.values()))}
                pools.append(ElasticPool(name, slots, roles, self._events))
        return pools

    def _elastic_role(self, role: str, router: Router, sync: WeightSync) -> ElasticRole:
        """An elastic role with simulated costs of a switch; the policy's new engines catch up as in a real run."""
        switch_s = self._costs.switch_s

        async def bring_current(name: str, engine: Engine, admit: Callable[[], None]) -> None:
            await asyncio.sleep(switch_s)
            if self._config.models[role].plays:
                await sync.catch_up(name, engine, admit)
            else:
                admit()

        return ElasticRole(router=router, bring_current=bring_current, max_rows=self._costs.engines[role].max_rows)

    def _compose(self, learners: Learners, routers: Mapping[str, Router]) -> PipelineComponents:
        return compose(
            self._config,
            learners,
            prompts=self._workload.prompts,
            too_long=lambda prompt: False,
            slots=EpisodeSlots(),
            play=make_play(self._workload, routers[POLICY], self._driver),
            judge=make_judge(self._workload, routers, self._driver),
            teachers=make_teachers(self._config, routers, CountingRenderer(self._workload.chars_per_token[POLICY])),
            journal=NoJournal(),
            events=self._events,
        )

    # -- counting ------------------------------------------------------------------------------------------------------

    async def _after_step(self, report: StepReport) -> None:
        staleness = max(report.step - 1 - group.version for group in report.groups)
        self._steps.append(self._step_end(report.stalls.steps_s, staleness, report.stalls))

    def _step_end(self, step_s: float, staleness: int, stalls: StallTimes) -> SimulatedStep:
        busy_s = {role: sum(engine.busy_s for engine in engines) for role, engines in self._engines.items()}
        rows = {
            role: most_rows(self._config, role, self._costs.engines[role].max_rows, len(engines))
            for role, engines in self._engines.items()
        }
        least_s = {
            role: sum(engine.least_busy_s(rows[role]) for engine in engines) for role, engines in self._engines.items()
        }
        others_s = {role: ranks.busy_s for role, ranks in self._ranks.items()}
        if self._costs.driver_request_s:
            others_s[DRIVER] = self._driver.busy_s
        return SimulatedStep(
            ended_s=asyncio.get_running_loop().time(),
            step_s=step_s,
            busy_s=busy_s | others_s,
            least_s=least_s | others_s,
            staleness=staleness,
            stalls=stalls,
        )

    def _result(self, began: SimulatedStep, pipeline: Pipeline, pools: Sequence[ElasticPool]) -> SimulatedRun:
        settled = select_settled_steps(len(self._steps), self._config.train.max_staleness)
        first, last = [began, *self._steps][settled.start], self._steps[settled.stop - 1]
        seconds = last.ended_s - first.ended_s
        counts = {role: len(engines) for role, engines in self._engines.items()}
        work_s = {role: (least_s - first.least_s[role]) / len(settled) for role, least_s in last.least_s.items()}
        return SimulatedRun(
            steps=tuple(self._steps),
            settled=settled,
            step_s=seconds / len(settled),
            busy={
                role: (busy_s - first.busy_s[role]) / (seconds * counts.get(role, 1)) if seconds else 0.0
                for role, busy_s in last.busy_s.items()
            },
            bound=compute_bound(work_s, self._placement, self._costs),
            max_staleness=max(step.staleness for step in self._steps),
            dropped=dict(pipeline.ledger.dropped),
            failed_judgements=dict(pipeline.counters.total_so_far().judging.failed),
            moves={move: count for pool in pools for move, count in pool.moves.items()},
            stalls=sum((self._steps[index].stalls for index in settled), StallTimes()),
        )


class NoJournal:
    """Records nothing."""

    def rollout(self, prompt_index: int, prompt: Prompt, rollout: Rollout) -> None: ...

    def record_verdict(self, rollout: Rollout, report: JudgeReport) -> None: ...

    def group_ended(self, end: GroupEnd) -> None: ...


def select_settled_steps(num_steps: int, max_staleness: int) -> range:
    """The steps without those in which the pipeline fills and drains: steps overlap with as many as staleness
    allows.
    """
    edge = max_staleness + 1 if max_staleness and num_steps > 2 * (max_staleness + 1) else 0
    return range(edge, num_steps - edge)


def most_rows(config: RunConfig, role: str, limit: int, num_engines: int) -> int:
    """The most rows in the batch of an engine: at most its limit, and its share of what may be in flight."""
    train = config.train
    played = train.group_size * config.models[role].plays
    judged = sum(judge.judgements_of_group(train.group_size) for judge in config.judging.select_asking(role).values())
    in_flight = (train.max_staleness + 1) * train.groups_per_batch * (played + judged)
    return max(1, min(limit, -(-in_flight // num_engines)))


# Share of the work that one further process per core adds: measured with three to five engines on two cores.
CONTEXT_SWITCH_COST = 0.16


def find_shared_devices(placement: Placement, cores: int) -> dict[str, SharedDevice]:
    """Name of a seat, or of the driver -> the device it shares with others. Processes with seats on CPUs run on any
    free one of `cores` cores; 0: each CPU slot is its own core. A process on several GPUs counts on the first that it
    shares. Busy processes get equal shares of a device, none more than one core or one GPU.
    """
    machine, devices = SharedDevice(cores, CONTEXT_SWITCH_COST), {}
    by_slot: dict[tuple[str, int], list[str]] = {}
    for seat in (seat for seats in placement.seats.values() for seat in seats):
        if cores and is_on_cpu(placement, seat):
            devices[seat.name] = machine
            continue
        for slot in seat.slots:
            by_slot.setdefault((seat.pool, slot), []).append(seat.name)
    for names in by_slot.values():
        if len(names) > 1:
            device = SharedDevice()
            devices |= {name: device for name in names if name not in devices}
    return devices | ({DRIVER: machine} if cores else {})
