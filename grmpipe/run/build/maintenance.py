"""Keeps a run's engines alive, up to date and where they are needed: health, elastic pools, the time-shared pool."""

import functools
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from grmpipe.models.types import Engine
from grmpipe.run.build.start_models import view_adapter
from grmpipe.run.prepare import Prepared
from grmpipe.run.run_model import RunModel
from grmpipe.scheduler.clock import ActiveClock, Standstill
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.scheduler.slots.elastic import ElasticPool, ElasticRole
from grmpipe.scheduler.slots.engine_replacement import (
    BringCurrent,
    Restart,
    RoleHealth,
    SharedRestart,
    need_no_weights,
)
from grmpipe.scheduler.slots.time_share import LEARNER, SharedRole, TimeShare
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.time_shared_learner import TimeSharedLearnerRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    """The maintenance of a run's engines.

    health: one per role with engines here. share: the time-shared pool of the learner. budget: the clocks that stand
    still while it holds requests back.
    """

    health: tuple[RoleHealth, ...]
    elastic: tuple[ElasticPool, ...]
    share: TimeShare | None
    budget: Standstill

    def stops(self, clock: ActiveClock, role: str | None = None) -> None:
        """Let this clock stand still while engines can't answer, those of a role or of any, and without a role also
        while endpoints may not be asked.
        """
        if role is None:
            self.budget.add(clock)
        for health in self.health:
            if role in (None, health.role):
                health.clocks.add(clock)
        for pool in self.elastic:
            if role is not None and role in pool.slots_by_role:
                pool.clocks[role].add(clock)
        if self.share is not None and (role is None or self.share.serves(role)):
            self.share.clocks.add(clock)

    def count_replaced(self) -> dict[str, int]:
        """Role -> engines that were replaced."""
        return {health.role: health.num_replaced for health in self.health}

    def loops(self) -> dict[str, Coroutine[object, object, object]]:
        """Name in errors -> what runs next to the flow."""
        loops: dict[str, Coroutine[object, object, object]] = {}
        loops |= {f"the health of {health.role}": health.run() for health in self.health}
        return loops | {f"the balance of {pool.name}": pool.run() for pool in self.elastic}


def make_maintenance(
    cluster: Cluster,
    prepared: Prepared,
    models: Mapping[str, RunModel],
    learner: LearnerRanks | None,
    events: EventSink,
    budget: Standstill,
) -> Maintenance:
    """learner: of the policy; None: nothing learns."""
    served = {name: model for name, model in models.items() if model.engines is not None}
    bring_current: dict[str, BringCurrent] = {
        name: need_no_weights if model.sync is None else model.sync.catch_up for name, model in served.items()
    }
    memory_still = nullcontext if learner is None else learner.still
    elastic = make_elastic_pools(prepared, served, bring_current, events, memory_still)
    for pool in elastic:
        bring_current |= {role: functools.partial(pool.bring_current, role) for role in pool.slots_by_role}
    share = None
    if isinstance(learner, TimeSharedLearnerRanks):
        share = make_time_share(prepared, served, bring_current, learner, events)
        time_shared = prepared.placement.time_sharing_roles
        bring_current |= {role: functools.partial(share.bring_current, role) for role in time_shared}
    health, limits = [], prepared.config.slots.health
    shared = {
        role.name: SharedRestart(
            functools.partial(cluster.restart_engine, role.name), served[role.name].router.members.alive
        )
        for role in prepared.roles.hosts
        if role.is_shared
    }
    for role, model in served.items():
        restart = make_restart(cluster, role, model.entry.host, shared.get(model.entry.host))
        health.append(RoleHealth(role, model.router, restart, limits, bring_current[role], events))
    return Maintenance(health=tuple(health), elastic=elastic, share=share, budget=budget)


def make_restart(cluster: Cluster, role: str, host: str, shared: SharedRestart | None) -> Restart:
    """What replaces an engine of a role by its name. host: the role whose engines these are."""
    if shared is None:
        return functools.partial(cluster.restart_engine, host)

    async def restart(name: str) -> Engine:
        engine = await shared.replace_engine(role, name)
        return engine if role == host else view_adapter(engine, role)

    return restart


def make_elastic_pools(
    prepared: Prepared,
    models: Mapping[str, RunModel],
    bring_current: Mapping[str, BringCurrent],
    events: EventSink,
    memory_still: Callable[[], AbstractAsyncContextManager[object]],
) -> tuple[ElasticPool, ...]:
    """memory_still: context of the learner, see ElasticRole."""
    placement, served = prepared.placement, prepared.roles.served
    learns_in = {seat.pool for seat in placement.seats.get(LEARNER, ())}

    def make_role(role: str, pool: str) -> ElasticRole:
        sync = models[role].sync
        return ElasticRole(
            router=models[role].router,
            bring_current=bring_current[role],
            max_rows=served[role].engine.max_rows,
            sleeps=served[role].is_time_shared,
            block_pushes=nullcontext if sync is None else sync.block_pushes,
            memory_still=memory_still if pool in learns_in else nullcontext,
        )

    pools = {name: slots for name in placement.pools if (slots := placement.elastic_slots(name))}
    return tuple(
        ElasticPool(
            name,
            slots,
            {role: make_role(role, name) for role in next(iter(slots.values()))},
            events,
        )
        for name, slots in pools.items()
    )


def make_time_share(
    prepared: Prepared,
    models: Mapping[str, RunModel],
    bring_current: Mapping[str, BringCurrent],
    learner: TimeSharedLearnerRanks,
    events: EventSink,
) -> TimeShare:
    """The time-shared pool of the learner, which must have freed its device before."""
    time_sharing = {name: prepared.roles.served[name] for name in prepared.placement.time_sharing_roles}
    roles = {
        name: SharedRole(
            router=models[name].router,
            bring_current=bring_current[name],
            sleeps=role.sleeps,
            lends=role.device == "cuda",
            is_pushed_to=role.learner == LEARNER,
        )
        for name, role in time_sharing.items()
    }
    share = TimeShare(prepared.roles[LEARNER].pool, roles, learner, events)
    learner.learner_phase = share.learner_phase
    return share
