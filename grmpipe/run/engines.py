"""The engines of a run behind their routers, and the pools whose slots move between roles. Decides no move."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace

from grmpipe.config.roles import (
    Model,
    engines_sleep,
    max_rows_of,
    options_of,
    shared_options,
    shares_engine,
    sync_config_of,
)
from grmpipe.run.engine_registry import ENGINES, shared_engine
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The engines of a run, by role.

    restart: makes a dead one anew, by the name that the role has for it.
    stored:  the weights of a GRM that nobody trains, where its engines lose them to the policy.
    """

    routers: Mapping[str, Router]
    restart: Mapping[str, Restart]
    swaps: bool = False  # the roles of a slot see one engine
    stored: StoredWeights | None = None

    def bring_current(self, syncs: Mapping[str, WeightSync]) -> dict[str, BringCurrent]:
        """What a newcomer of each role needs before its first request. syncs: of the roles that learn."""
        frozen = need_no_weights if self.stored is None else self.stored.bring_current
        ways: dict[str, BringCurrent] = dict.fromkeys(self.routers, frozen)
        return ways | {role: functools.partial(sync.catch_up, anew=self.swaps) for role, sync in syncs.items()}


async def start_routers(cluster: Cluster, prepared: Prepared, events: EventSink) -> Served:
    """All engines. Of those that share a device's memory one role sleeps before the next one starts."""
    models = [model for model in (prepared.policy, prepared.grm) if model is not None]
    if shares_engine(prepared.config, prepared.placement):
        return await start_shared(cluster, prepared, events)
    routers: dict[str, Router] = {}
    if any(takes_turns(model.name, prepared) for model in models):
        for model in reversed(models):  # the first one stays awake
            routers[model.name] = await start_engines(cluster, model, prepared, events)
            if model is not models[0]:
                await put_to_sleep(routers[model.name])
    else:
        started = await asyncio.gather(*(start_engines(cluster, model, prepared, events) for model in models))
        routers = {model.name: router for model, router in zip(models, started, strict=True)}
    return Served(
        routers={model.name: routers[model.name] for model in models},
        restart={model.name: functools.partial(cluster.restart_engine, model.name) for model in models},
    )


async def start_engines(cluster: Cluster, model: Model, prepared: Prepared, events: EventSink) -> Router:
    options = options_of(model.name, prepared.config)
    make_engine = ENGINES[options.engine](model, prepared.config, prepared.placement)
    return router_of(model, await cluster.start_engines(model.name, make_engine), prepared, events)


async def start_shared(cluster: Cluster, prepared: Prepared, events: EventSink) -> Served:
    """An engine a slot, with the GRM's weights: what it scores by them is what a swap is held to. The policy's come by
    the first push, before anybody asks for a token of it."""
    config, placement, grm = prepared.config, prepared.placement, prepared.grm
    assert grm is not None
    engines = await cluster.start_engines(grm.name, shared_engine(grm, config, placement))
    slots = placement.elastic_slots(placement.seats[grm.name][0].pool)
    shared = SharedEngines(slots, grm.name, engines, functools.partial(cluster.restart_engine, grm.name))
    stored = None if config.cotrain.enabled else await stored_weights(grm, next(iter(engines.values())), prepared)
    models = {model.name: model for model in (prepared.policy, grm)}
    return Served(
        routers={role: router_of(model, shared.seen_by(role), prepared, events) for role, model in models.items()},
        restart=dict.fromkeys(models, shared.restart),
        swaps=True,
        stored=stored,
    )


async def stored_weights(model: Model, engine: Engine, prepared: Prepared) -> StoredWeights:
    """Of an engine that was just started from them."""
    config, sync = prepared.config, sync_config_of(model.name, prepared.config)
    if options_of(model.name, config).dtype != "float32":  # their bucket names no type
        sync = replace(sync, probe_tolerance=sync.probe_tolerance_16bit)
    probe_ids = model.renderer.render(prepared.prompts.at(0).messages)[: sync.probe_tokens]
    return StoredWeights(path=model.path, probe_ids=probe_ids, logprobs=await engine.score(probe_ids), config=sync)


def router_of(model: Model, engines: Mapping[str, Engine], prepared: Prepared, events: EventSink) -> Router:
    moves = is_elastic(model.name, prepared) or model.name in prepared.placement.time_sharing_roles
    return Router(model.name, engines, events, continuation_of(model, prepared) if moves else None)


def is_elastic(role: str, prepared: Prepared) -> bool:
    placement = prepared.placement
    return bool(placement.elastic_slots(placement.seats[role][0].pool))


def takes_turns(role: str, prepared: Prepared) -> bool:
    """Do its engines hand a device's memory to those of another role?"""
    config, placement = prepared.config, prepared.placement
    return (
        is_elastic(role, prepared) and not shares_engine(config, placement) and engines_sleep(role, config, placement)
    )


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
    served: Served,
    bring_current: Mapping[str, BringCurrent],
    syncs: Mapping[str, WeightSync],
    events: EventSink,
    memory_still: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
) -> tuple[ElasticPool, ...]:
    """The pools whose slots move. memory_still: of the learner."""
    config, placement = prepared.config, prepared.placement
    pools = {name: slots for name in placement.pools if (slots := placement.elastic_slots(name))}
    return tuple(
        ElasticPool(
            name,
            slots,
            {
                role: ElasticRole(
                    router=served.routers[role],
                    bring_current=bring_current[role],
                    max_rows=shared_options(config).max_batch_rows if served.swaps else max_rows_of(role, config),
                    sleeps=takes_turns(role, prepared),
                    nothing_pushed=syncs[role].nothing_pushed if role in syncs else nullcontext,
                    memory_still=memory_still if placement.seats["learner"][0].pool == name else nullcontext,
                )
                for role in next(iter(slots.values()))
            },
            config.balance,
            events,
            swaps=served.swaps,
        )
        for name, slots in pools.items()
    )
