"""The engines of a run behind their routers, and its elastic pools."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace

from grmpipe.config.roles import Model, Roles
from grmpipe.models.seeds import derive_seed
from grmpipe.models.types import Engine
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.scheduler.routing.migration import Continuation
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.slots.elastic import ElasticPool, ElasticRole
from grmpipe.scheduler.slots.engine_replacement import BringCurrent, Restart, need_no_weights
from grmpipe.scheduler.slots.shared_engine import SharedEngines
from grmpipe.scheduler.slots.sleep import put_to_sleep
from grmpipe.scheduler.weights.stored_weights import StoredWeights, load_files
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.validate.prepare import Prepared

MakeEngine = Callable[[int], Engine]  # rank of its seat -> engine; sent to the engine's process
MOST_PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEngines:
    """The engines of a run, by role.

    restart:  restarts a dead engine, by the role's name for it.
    swapping: roles that share their engines with others, which swap weights.
    stored:   weights of untrained roles among these.
    """

    routers: Mapping[str, Router]
    restart: Mapping[str, Restart]
    swapping: frozenset[str] = frozenset()
    stored: Mapping[str, StoredWeights] = field(default_factory=dict)

    def bring_current(self, syncs: Mapping[str, WeightSync]) -> dict[str, BringCurrent]:
        """Role -> what brings a new engine up to date before its first request. syncs: of trained roles."""
        ways: dict[str, BringCurrent] = dict.fromkeys(self.routers, need_no_weights)
        ways |= {role: stored.bring_current for role, stored in self.stored.items()}
        return ways | {
            role: functools.partial(sync.catch_up, is_replacement=role in self.swapping) for role, sync in syncs.items()
        }

    @staticmethod
    def join(parts: Sequence[ServingEngines], order: Iterable[str]) -> ServingEngines:
        """All parts as one, with the roles in this order."""
        routers = {role: router for part in parts for role, router in part.routers.items()}
        return ServingEngines(
            routers={role: routers[role] for role in order},
            restart={role: restart for part in parts for role, restart in part.restart.items()},
            swapping=frozenset().union(*(part.swapping for part in parts)),
            stored={role: stored for part in parts for role, stored in part.stored.items()},
        )


async def start_routers(
    cluster: Cluster, prepared: Prepared, events: EventSink, models: Sequence[Model] | None = None
) -> ServingEngines:
    """Start the engines of these models (all by default). Of roles that share a device's memory, one sleeps before the
    next one starts.
    """
    models = prepared.models if models is None else models
    parts = await asyncio.gather(
        *(start(cluster, some, prepared, events) for start, some in find_started_together(models, prepared.roles))
    )
    return ServingEngines.join(parts, [model.name for model in models])


StartTogether = Callable[[Cluster, Sequence[Model], Prepared, EventSink], Awaitable[ServingEngines]]


def find_started_together(models: Sequence[Model], roles: Roles) -> list[tuple[StartTogether, list[Model]]]:
    """The models that are started together, and how: those on one engine, those that take turns on the devices of a
    pool, and each of the others.
    """
    together: dict[tuple[StartTogether, str], list[Model]] = {}
    for model in models:
        role = roles.served[model.name]
        if role.shares_with:
            together.setdefault((start_shared, role.pool), []).append(model)
        elif role.is_time_shared:
            together.setdefault((start_in_turn, role.pool), []).append(model)
        else:
            together[start_alone, model.name] = [model]
    return [(start, some) for (start, _), some in together.items()]


async def start_alone(
    cluster: Cluster, models: Sequence[Model], prepared: Prepared, events: EventSink
) -> ServingEngines:
    (model,) = models
    return make_serving(cluster, {model.name: await start_engines(cluster, model, prepared, events)})


async def start_in_turn(
    cluster: Cluster, models: Sequence[Model], prepared: Prepared, events: EventSink
) -> ServingEngines:
    """Start engines that share a device's memory: only those of the first model stay awake."""
    routers: dict[str, Router] = {}
    for model in reversed(models):
        routers[model.name] = await start_engines(cluster, model, prepared, events)
        if model is not models[0]:
            await put_to_sleep(routers[model.name])
    return make_serving(cluster, routers)


def make_serving(cluster: Cluster, routers: Mapping[str, Router]) -> ServingEngines:
    return ServingEngines(
        routers=routers, restart={role: functools.partial(cluster.restart_engine, role) for role in routers}
    )


def engine_factory(model: Model, roles: Roles, seed: int) -> MakeEngine:
    """A function that makes the engine of a seat of the role, and of all roles that it serves."""
    return functools.partial(
        roles.engine_on_slot(model.name).make, roles.served[model.name].engine_spec(model.path, seed)
    )


async def start_engines(cluster: Cluster, model: Model, prepared: Prepared, events: EventSink) -> Router:
    make_engine = engine_factory(model, prepared.roles, prepared.config.seed)
    return make_router(model, await cluster.start_engines(model.name, make_engine), prepared, events)


async def start_shared(
    cluster: Cluster, models: Sequence[Model], prepared: Prepared, events: EventSink
) -> ServingEngines:
    """Start one engine per slot for all models of an elastic pool, with the weights of the last one. The first push
    brings the policy's, before any of its tokens is sampled.
    """
    owner, roles = models[-1], prepared.roles.served
    make_engine = engine_factory(owner, prepared.roles, prepared.config.seed)
    engines = await cluster.start_engines(owner.name, make_engine)
    shared = SharedEngines(
        prepared.placement.elastic_slots(roles[owner.name].pool),
        owner.name,
        engines,
        functools.partial(cluster.restart_engine, owner.name),
    )
    frozen = [model for model in models if roles[model.name].learner is None]
    return ServingEngines(
        routers={model.name: make_router(model, shared.list_engines(model.name), prepared, events) for model in models},
        restart={model.name: shared.restart for model in models},
        swapping=frozenset(model.name for model in models),
        stored=await read_stored_weights(frozen, owner, next(iter(engines.values())), prepared),
    )


async def read_stored_weights(
    frozen: Sequence[Model], owner: Model, engine: Engine, prepared: Prepared
) -> dict[str, StoredWeights]:
    """The weights of untrained models that share an engine, which was just started as its owner's: its log-probs by
    them are the reference of each swap.
    """
    others = [model for model in frozen if model is not owner]
    found = {owner.name: await read_by(engine, owner, prepared)} if owner in frozen else {}
    for model in others:
        await load_files(engine, model.path)
        found[model.name] = await read_by(engine, model, prepared)
    if others:
        await load_files(engine, owner.path)
    return found


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
    moves = prepared.roles.served[model.name].is_elastic or model.name in prepared.placement.time_sharing_roles
    return Router(model.name, engines, events, make_continuation(model, prepared.roles) if moves else None)


def make_continuation(model: Model, roles: Roles) -> Continuation:
    """What a request needs to migrate, by how its engine makes random numbers."""
    by_position = roles.served[model.name].engine.seeds_by_position
    return Continuation(decode=model.renderer.decode, seed_after=same_seed if by_position else other_seed)


def same_seed(seed: int, num_sampled: int) -> int:
    return seed


def other_seed(seed: int, num_sampled: int) -> int:
    return derive_seed(seed, f"after {num_sampled}")


def elastic_pools(
    prepared: Prepared,
    served: ServingEngines,
    bring_current: Mapping[str, BringCurrent],
    syncs: Mapping[str, WeightSync],
    events: EventSink,
    memory_still: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
) -> tuple[ElasticPool, ...]:
    """The elastic pools. memory_still: context of the learner, see ElasticRole."""
    placement, roles = prepared.placement, prepared.roles
    pools = {name: slots for name in placement.pools if (slots := placement.elastic_slots(name))}
    learns_in = {seat.pool for seat in placement.seats.get("learner", ())}
    return tuple(
        ElasticPool(
            name,
            slots,
            {
                role: ElasticRole(
                    router=served.routers[role],
                    bring_current=bring_current[role],
                    max_rows=roles.engine_on_slot(role).max_rows,
                    sleeps=roles.served[role].is_time_shared,
                    block_pushes=syncs[role].block_pushes if role in syncs else nullcontext,
                    memory_still=memory_still if name in learns_in else nullcontext,
                )
                for role in next(iter(slots.values()))
            },
            prepared.config.slots.balance,
            events,
            swaps=not served.swapping.isdisjoint(next(iter(slots.values()))),
        )
        for name, slots in pools.items()
    )
