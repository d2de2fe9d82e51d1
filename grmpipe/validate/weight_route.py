"""Which way a learner's weights take, by engine and placement. Moves nothing, asks no machine."""

from __future__ import annotations

from grmpipe.config.roles import ServedRole
from grmpipe.config.run_config import RunConfig
from scheduler.placement import Placement
from scheduler.weights.transport import Route, choose_transport


def transport_of(role: ServedRole, config: RunConfig, placement: Placement, *, same_machine: bool) -> str:
    """What `sync.transport` comes to, from the learner of a role to its engines. Raises ValueError that names it, and
    what works."""
    route = route_of(role, config, placement, same_machine)
    return choose_transport(config.sync.transport, role.model.engine, role.engine.transports, route)


def route_of(role: ServedRole, config: RunConfig, placement: Placement, same_machine: bool) -> Route:
    assert role.learner is not None, f"{role.name} doesn't learn"
    learner, engines = placement.seats[role.learner], placement.seats[role.name]
    ranks, served = ([(seat.pool, seat.slots) for seat in seats] for seats in (learner, engines))
    return Route(
        learner=placement.pools[learner[0].pool].resource,
        engines=placement.pools[engines[0].pool].resource,
        same_machine=same_machine,
        with_engine=ranks[0] in served,
        all_shared=set(served) <= set(ranks),
        same_process=config.cluster.kind == "inprocess" and role.engine.in_process,
    )
