"""Chooses the transport of a learner's weights, by engine and placement. Moves nothing, asks no machine."""

from __future__ import annotations

import logging

from grmpipe.config.roles import ServedRole
from grmpipe.config.run_config import RunConfig
from models.engines.engine_kind import AnyEngine
from models.engines.installed import nccl_version
from models.types import TransportKind
from models.weights.transports import TRANSPORTS, transport_kind
from scheduler.placement import Placement
from scheduler.weights.transport import Route, choose_transport

log = logging.getLogger(__name__)


def transport_of(role: ServedRole, config: RunConfig, placement: Placement, *, same_machine: bool) -> str:
    """The transport for `sync.transport`, from the learner of a role to its engines: a name of the table, or the dotted
    path of a user's own. ValueError names it and what works.
    """
    name = config.sync.transport
    wanted = wanted_transport(name)
    taken = taken_by(role.engine, *([] if wanted is None else [wanted]))
    route = route_of(role, config, placement, same_machine)
    chosen = choose_transport(wanted, role.model.engine, taken, route)
    if chosen.group == "nccl" and (differ := different_nccl(role.engine)):
        if wanted is not None:
            raise ValueError(f"sync.transport: nccl: {differ}, or set sync.transport to auto")
        others = [kind for kind in taken if kind.group != "nccl"]
        chosen = choose_transport(None, role.model.engine, others, route)
        log.warning("weights can't be sent by nccl but by %s: %s", chosen.name, differ)
    return chosen.name if wanted is None else name


def different_nccl(engine: AnyEngine) -> str:
    """Why NCCL can't connect a learner with an engine, and what to type; empty if it can, or that isn't known here."""
    ours, theirs = nccl_version(), engine.nccl_version()
    if not ours or not theirs or ours == theirs:
        return ""
    return (
        f"the learner has NCCL {ours} and the engine's environment {theirs}, and NCCL refuses to connect two "
        f"versions; type `pip install nvidia-nccl-cu13=={ours}` in the engine's environment"
    )


def wanted_transport(name: str) -> TransportKind | None:
    """The transport that `sync.transport` names; None: choose the best. Raises ValueError for an unknown name."""
    return None if name == "auto" else transport_kind(name)


def taken_by(engine: AnyEngine, *others: TransportKind) -> tuple[TransportKind, ...]:
    """The transports that an engine supports, the best first: those of the table, and `others`."""
    best = [transport_kind(name) for name in engine.transports]
    return tuple(dict.fromkeys([*best, *TRANSPORTS.values(), *others] if engine.any_transport else best))


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
