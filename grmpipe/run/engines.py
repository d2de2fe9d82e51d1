"""The engines of a run behind their routers, and its elastic pools. Decides no move."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace

from grmpipe.config.roles import Model, Roles
from grmpipe.validate.prepare import Prepared
from models.seeds import derive_seed
from models.types import Engine
from scheduler.events import EventSink
from scheduler.processes.actors import Cluster
from scheduler.routing.migration import Continuation
from scheduler.routing.router import Router
from scheduler.slots.elastic import ElasticPool, ElasticRole
from scheduler.slots.health import BringCurrent, Restart, need_no_weights
from scheduler.slots.shared_engine import SharedEngines
from scheduler.slots.sleep import put_to_sleep
from scheduler.weights.stored_weights import StoredWeights
from scheduler.weights.weight_sync import WeightSync

MakeEngine = Callable[[int], Engine]  # rank of its seat -> engine; sent to the engine's process


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEngines:
    """The engines of a run, by role.

    restart: restarts a dead engine, by the role's name for it.
    stored:  weights of an untrained GRM that shares its engines with the policy; None otherwise.
    """

    routers: Mapping[str, Router]
    restart: Mapping[str, Restart]
    swaps: bool = False  # whether the roles of a slot share one engine
    stored: StoredWeights | None = None

    def bring_current(self, syncs: Mapping[str, WeightSync]) -> dict[str, BringCurrent]:
        """Role -> what brings a new engine up to date before its first request. syncs: of trained roles."""
        frozen = need_no_weights if self.stored is None else self.stored.bring_current
        ways: dict[str, BringCurrent] = dict.fromkeys(self.routers, frozen)
        return ways | {role: functools.partial(sync.catch_up, anew=self.swaps) for role, sync in syncs.items()}


async def start_routers(cluster: Cluster, prepared: Prepared, events: EventSink) -> ServingEngines:
    """Start all engines. Of roles that share a device's memory, one sleeps before the next one starts."""
    models, served = prepared.models, prepared.roles.served
    if any(role.shares_with for role in prepared.roles.seated):
        return await start_shared(cluster, prepared, events)
    routers: dict[str, Router] = {}
    if any(served[model.name].is_time_shared for model in models):
        for model in reversed(models):  # the first one stays awake
            routers[model.name] = await start_engines(cluster, model, prepared, events)
            if model is not models[0]:
                await put_to_sleep(routers[model.name])
    else:
        started = await asyncio.gather(*(start_engines(cluster, model, prepared, events) for model in models))
        routers = {model.name: router for model, router in zip(models, started, strict=True)}
    return ServingEngines(
        routers={model.name: routers[model.name] for model in models},
        restart={model.name: functools.partial(cluster.restart_engine, model.name) for model in models},
    )


def engine_factory(model: Model, roles: Roles, seed: int) -> MakeEngine:
    """A function that makes the engine of a seat of the role, and of all roles that it serves."""
    return functools.partial(
        roles.engine_on_slot(model.name).make, roles.served[model.name].engine_spec(model.path, seed)
    )


async def start_engines(cluster: Cluster, model: Model, prepared: Prepared, events: EventSink) -> Router:
    make_engine = engine_factory(model, prepared.roles, prepared.config.seed)
    return router_of(model, await cluster.start_engines(model.name, make_engine), prepared, events)


async def start_shared(cluster: Cluster, prepared: Prepared, events: EventSink) -> ServingEngines:
    """Start one engine per slot, with the GRM's weights: its scores by them are the reference of a swap. The first push
    brings the policy's, before any of its tokens is sampled.
    """
    placement, grm = prepared.placement, prepared.grm
    assert grm is not None
    role = prepared.roles.served[grm.name]
    engines = await cluster.start_engines(grm.name, engine_factory(grm, prepared.roles, prepared.config.seed))
    shared = SharedEngines(
        placement.elastic_slots(role.pool), grm.name, engines, functools.partial(cluster.restart_engine, grm.name)
    )
    frozen = role.learner is None
    stored = await stored_weights(grm, next(iter(engines.values())), prepared) if frozen else None
    return ServingEngines(
        routers={
            model.name: router_of(model, shared.seen_by(model.name), prepared, events) for model in prepared.models
        },
        restart={model.name: shared.restart for model in prepared.models},
        swaps=True,
        stored=stored,
    )


async def stored_weights(model: Model, engine: Engine, prepared: Prepared) -> StoredWeights:
    """The weights of an engine that was just started from them."""
    role = prepared.roles.served[model.name]
    sync = role.sync
    if role.dtype != "float32":  # their bucket has no dtype
        sync = replace(sync, probe_tolerance=sync.probe_tolerance_16bit)
    probe_ids = model.renderer.render(prepared.prompts.at(0).messages)[: sync.probe_tokens]
    return StoredWeights(path=model.path, probe_ids=probe_ids, logprobs=await engine.score(probe_ids), config=sync)


def router_of(model: Model, engines: Mapping[str, Engine], prepared: Prepared, events: EventSink) -> Router:
    moves = prepared.roles.served[model.name].is_elastic or model.name in prepared.placement.time_sharing_roles
    return Router(model.name, engines, events, continuation_of(model, prepared.roles) if moves else None)


def continuation_of(model: Model, roles: Roles) -> Continuation:
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
                    nothing_pushed=syncs[role].nothing_pushed if role in syncs else nullcontext,
                    memory_still=memory_still if placement.seats["learner"][0].pool == name else nullcontext,
                )
                for role in next(iter(slots.values()))
            },
            prepared.config.balance,
            events,
            swaps=served.swaps,
        )
        for name, slots in pools.items()
    )
