"""Which way a learner's weights take, by engine and placement. Moves nothing, asks no machine."""

from __future__ import annotations

from grmpipe.config.roles import options_of
from grmpipe.config.run_config import RunConfig
from models.engines.taken_transports import TAKES
from models.types import TransportKind
from models.weights.transports import transport_kind
from scheduler.placement import Placement
from scheduler.weights.transport import Route, choose_transport


def transport_of(
    config: RunConfig, placement: Placement, *, same_machine: bool, learner: str = "learner", engines: str = "policy"
) -> str:
    """What `sync.transport` comes to, from a role that learns to the role that serves what it learnt: a name of the
    table, or the dotted path of the user's own. Raises ValueError that names it, and what works."""
    name, engine = config.sync.transport, options_of(engines, config).engine
    wanted = wanted_transport(name)
    taken = TAKES[engine].among(*([] if wanted is None else [wanted]))
    chosen = choose_transport(wanted, engine, taken, route_of(config, placement, same_machine, learner, engines))
    return chosen.name if wanted is None else name


def wanted_transport(name: str) -> TransportKind | None:
    """What `sync.transport` names; None: the best one. Raises ValueError where there is none of that name."""
    return None if name == "auto" else transport_kind(name)


def route_of(
    config: RunConfig, placement: Placement, same_machine: bool, learning: str = "learner", serving: str = "policy"
) -> Route:
    learner, engines = placement.seats[learning], placement.seats[serving]
    ranks, served = ([(seat.pool, seat.slots) for seat in seats] for seats in (learner, engines))
    return Route(
        learner=placement.pools[learner[0].pool].resource,
        engines=placement.pools[engines[0].pool].resource,
        same_machine=same_machine,
        with_engine=ranks[0] in served,
        all_shared=set(served) <= set(ranks),
        same_process=config.cluster.kind == "inprocess" and options_of(serving, config).engine == "embedded",
    )
