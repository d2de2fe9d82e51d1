"""The engines of a run behind their routers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from grmpipe.models.adapter_view import AdapterView
from grmpipe.models.seeds import derive_seed
from grmpipe.models.types import Engine, ServesAdapters
from grmpipe.roles.roles import Model, Roles
from grmpipe.run.prepare import Prepared
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.scheduler.routing.router import Continuation, Router
from grmpipe.scheduler.slots.sleep import put_to_sleep
from grmpipe.scheduler.weights.stored_weights import StoredWeights

MakeEngine = Callable[[int], Engine]  # rank of its seat -> engine; sent to the engine's process
MOST_PROBE_TOKENS = 32


async def start_routers(cluster: Cluster, prepared: Prepared, events: EventSink) -> dict[str, Router]:
    """Start all engines, by role. Of roles that share a device's memory, one sleeps before the next one starts."""
    in_turn: dict[str, list[Model]] = {}
    for role in prepared.roles.hosts:
        together = f"pool {role.pool}" if role.is_time_shared else role.name
        in_turn.setdefault(together, []).append(prepared.models[role.name])
    started = await asyncio.gather(*(start_in_turn(cluster, some, prepared, events) for some in in_turn.values()))
    routers = {role: router for some in started for role, router in some.items()}
    for role in (role for role in prepared.roles.seated if role.model.adapter_of):
        engines = routers[role.model.adapter_of].members.alive
        views = {name: view_adapter(engine, role.name) for name, engine in engines.items()}
        routers[role.name] = make_router(prepared.models[role.name], views, prepared, events)
    return {role.name: routers[role.name] for role in prepared.roles.seated}


def view_adapter(engine: Engine, name: str) -> Engine:
    """One of the models of an engine whose kind applies adapters."""
    return AdapterView(cast(ServesAdapters, engine), name)


async def start_in_turn(
    cluster: Cluster, models: Sequence[Model], prepared: Prepared, events: EventSink
) -> dict[str, Router]:
    """Start the engines of one model, or of several that share a device's memory: only the first one's stay awake."""
    routers: dict[str, Router] = {}
    for model in reversed(models):
        routers[model.name] = await start_engines(cluster, model, prepared, events)
        if model is not models[0]:
            await put_to_sleep(routers[model.name])
    return routers


def engine_factory(model: Model, roles: Roles, seed: int) -> MakeEngine:
    """A function that makes the engine of a seat of the role."""
    role = roles.served[model.name]
    return functools.partial(role.engine.make, role.engine_spec(model.path, seed))


async def start_engines(cluster: Cluster, model: Model, prepared: Prepared, events: EventSink) -> Router:
    make_engine = engine_factory(model, prepared.roles, prepared.config.seed)
    return make_router(model, await cluster.start_engines(model.name, make_engine), prepared, events)


async def read_by(engine: Engine, model: Model, prepared: Prepared) -> StoredWeights:
    """The weights of a model that an engine has just loaded."""
    role = prepared.roles.served[model.name]
    sync = replace(role.sync, probe_tolerance=role.sync.tolerance({role.dtype}))  # their bucket has no dtype
    probe_ids = pick_probe(model, prepared)
    return StoredWeights(path=model.path, probe_ids=probe_ids, logprobs=await engine.score(probe_ids), config=sync)


def pick_probe(model: Model, prepared: Prepared) -> tuple[int, ...]:
    """Tokens that show whether two copies of a model are equal: the beginning of a prompt of the data."""
    return tuple(model.renderer.render(prepared.prompts.at(0).messages)[:MOST_PROBE_TOKENS])


def make_router(model: Model, engines: Mapping[str, Engine], prepared: Prepared, events: EventSink) -> Router:
    moves = prepared.roles.served[model.name].takes_turns
    return Router(model.name, engines, events, make_continuation(model, prepared.roles) if moves else None)


def make_continuation(model: Model, roles: Roles) -> Continuation:
    """What a request needs to migrate, by how its engine makes random numbers."""
    by_position = roles.served[model.name].engine.seeds_by_position
    return Continuation(decode=model.renderer.decode, seed_after=same_seed if by_position else other_seed)


def same_seed(seed: int, num_sampled: int) -> int:
    return seed


def other_seed(seed: int, num_sampled: int) -> int:
    return derive_seed(seed, f"after {num_sampled}")
