"""Which way the policy's weights take, by engine and placement. Moves nothing, asks no machine."""

from __future__ import annotations

from grmpipe.config import RunConfig
from scheduler.placement import Placement
from scheduler.transport import Route, choose_transport


def transport_of(config: RunConfig, placement: Placement, *, same_machine: bool) -> str:
    """What `sync.transport` comes to. Raises ValueError that names it, and what works."""
    return choose_transport(config.sync.transport, config.policy.engine, route_of(config, placement, same_machine))


def route_of(config: RunConfig, placement: Placement, same_machine: bool) -> Route:
    learner, engines = placement.seats["learner"], placement.seats["policy"]
    shared = {(learner[0].pool, learner[0].slots)} == {(seat.pool, seat.slots) for seat in engines}
    return Route(
        learner=placement.pools[learner[0].pool].resource,
        engines=placement.pools[engines[0].pool].resource,
        same_machine=same_machine,
        same_gpu=shared and len(learner) == 1,
        same_process=config.cluster.kind == "inprocess" and config.policy.engine == "embedded",
    )
