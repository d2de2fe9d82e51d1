"""Keeps a run's engines alive, up to date and where they are needed: health, elastic pools, the time-shared pool."""

import functools
from collections.abc import Coroutine, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from grmpipe.run.build.engines import elastic_pools
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.slots.elastic import ElasticPool
from grmpipe.scheduler.slots.engine_replacement import BringCurrent, RoleHealth, need_no_weights
from grmpipe.scheduler.slots.time_share import LEARNER, SharedRole, TimeShare
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.time_shared_learner import TimeSharedLearnerRanks
from grmpipe.validate.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    """The maintenance of a run's engines. health: of roles with engines here. share: the time-shared pool of the
    learner.
    """

    health: tuple[RoleHealth, ...]
    elastic: tuple[ElasticPool, ...]
    share: TimeShare | None

    def stops(self, clock: ActiveClock, role: str | None = None) -> None:
        """Let this clock stand still while engines can't answer: those of a role, or of any."""
        for health in self.health:
            if role in (None, health.role):
                health.clocks.add(clock)
        for pool in self.elastic:
            if role is not None and role in pool.slots_by_role:
                pool.clocks[role].add(clock)
        if self.share is not None and (role is None or self.share.serves(role)):
            self.share.clocks.add(clock)

    def loops(self) -> dict[str, Coroutine[object, object, object]]:
        """Name in errors -> what runs next to the flow."""
        loops: dict[str, Coroutine[object, object, object]] = {}
        loops |= {f"the health of {health.role}": health.run() for health in self.health}
        return loops | {f"the balance of {pool.name}": pool.run() for pool in self.elastic}


def make_maintenance(
    cluster: Cluster,
    prepared: Prepared,
    routers: Mapping[str, Router],
    learner: LearnerRanks | None,
    syncs: Mapping[str, WeightSync],
    events: EventSink,
) -> Maintenance:
    """learner: None in an evaluation. syncs: of trained roles."""
    bring_current: dict[str, BringCurrent] = dict.fromkeys(routers, need_no_weights)
    bring_current |= {role: sync.catch_up for role, sync in syncs.items()}
    memory_still = nullcontext if learner is None else learner.still
    elastic = elastic_pools(prepared, routers, bring_current, syncs, events, memory_still)
    for pool in elastic:
        bring_current |= {role: functools.partial(pool.bring_current, role) for role in pool.slots_by_role}
    share = None
    if isinstance(learner, TimeSharedLearnerRanks):
        share = make_time_share(prepared, routers, bring_current, learner, events)
        time_shared = prepared.placement.time_sharing_roles
        bring_current |= {role: functools.partial(share.bring_current, role) for role in time_shared}
    health = tuple(
        RoleHealth(
            role,
            router,
            functools.partial(cluster.restart_engine, role),
            prepared.config.slots.health,
            bring_current[role],
            events,
        )
        for role, router in routers.items()
    )
    return Maintenance(health=health, elastic=elastic, share=share)


def make_time_share(
    prepared: Prepared,
    routers: Mapping[str, Router],
    bring_current: Mapping[str, BringCurrent],
    learner: TimeSharedLearnerRanks,
    events: EventSink,
) -> TimeShare:
    """The time-shared pool of the learner, which must have freed its device before."""
    time_sharing = {name: prepared.roles.served[name] for name in prepared.placement.time_sharing_roles}
    roles = {
        name: SharedRole(
            router=routers[name],
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
