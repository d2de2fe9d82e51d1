"""The engines of a run behind their routers, and the pools whose slots move between roles. Decides no move."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from grmpipe.engines import ENGINES, Model, engines_sleep, max_rows_of, options_of
from grmpipe.prepare import Prepared
from models.seeds import derive_seed
from scheduler.actors import Cluster
from scheduler.continuation import Continuation
from scheduler.elastic import ElasticPool, ElasticRole
from scheduler.events import EventSink
from scheduler.health import BringCurrent
from scheduler.router import Router
from scheduler.sleep import put_to_sleep
from scheduler.weight_sync import WeightSync


async def start_routers(cluster: Cluster, prepared: Prepared, events: EventSink) -> dict[str, Router]:
    """All engines, by role. Of those that share a device's memory one role sleeps before the next one starts."""
    models = [model for model in (prepared.policy, prepared.grm) if model is not None]
    if not any(takes_turns(model.name, prepared) for model in models):
        routers = await asyncio.gather(*(start_engines(cluster, model, prepared, events) for model in models))
        return {model.name: router for model, router in zip(models, routers, strict=True)}
    started: dict[str, Router] = {}
    for model in reversed(models):  # the first one stays awake
        started[model.name] = await start_engines(cluster, model, prepared, events)
        if model is not models[0]:
            await put_to_sleep(started[model.name])
    return {model.name: started[model.name] for model in models}


async def start_engines(cluster: Cluster, model: Model, prepared: Prepared, events: EventSink) -> Router:
    options = options_of(model.name, prepared.config)
    make_engine = ENGINES[options.engine](model, prepared.config, prepared.placement)
    engines = await cluster.start_engines(model.name, make_engine)
    moves = is_elastic(model.name, prepared) or model.name in prepared.placement.time_sharing_roles
    return Router(model.name, engines, events, continuation_of(model, prepared) if moves else None)


def is_elastic(role: str, prepared: Prepared) -> bool:
    placement = prepared.placement
    return bool(placement.elastic_slots(placement.seats[role][0].pool))


def takes_turns(role: str, prepared: Prepared) -> bool:
    """Do its engines hand a device's memory to those of another role?"""
    return is_elastic(role, prepared) and engines_sleep(role, prepared.config, prepared.placement)


def continuation_of(model: Model, prepared: Prepared) -> Continuation:
    """The embedded engine draws by the position in the text, all others by the order of their draws."""
    by_position = options_of(model.name, prepared.config).engine == "embedded"
    return Continuation(decode=model.renderer.decode, seed_after=same_seed if by_position else other_seed)


def same_seed(seed: int, num_sampled: int) -> int:
    return seed


def other_seed(seed: int, num_sampled: int) -> int:
    return derive_seed(seed, f"after {num_sampled}")


def elastic_pools(
    prepared: Prepared,
    routers: Mapping[str, Router],
    bring_current: Mapping[str, BringCurrent],
    sync: WeightSync,
    events: EventSink,
) -> tuple[ElasticPool, ...]:
    """The pools whose slots move."""
    config, placement = prepared.config, prepared.placement
    pools = {name: slots for name in placement.pools if (slots := placement.elastic_slots(name))}
    return tuple(
        ElasticPool(
            name,
            slots,
            {
                role: ElasticRole(
                    router=routers[role],
                    bring_current=bring_current[role],
                    max_rows=max_rows_of(role, config),
                    sleeps=takes_turns(role, prepared),
                    nothing_pushed=sync.nothing_pushed,
                )
                for role in next(iter(slots.values()))
            },
            config.balance,
            events,
        )
        for name, slots in pools.items()
    )
