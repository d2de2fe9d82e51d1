"""Starts the scorers of the meta-RM and of scalar reward models, or connects their endpoints."""

import asyncio
import functools
from dataclasses import dataclass

from grmpipe.config.roles import make_option_key
from grmpipe.judge.kinds.scalar import ScalarModel
from grmpipe.judge.logged_scorer import LoggedScorer
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.types import RemoteScorer, Scorer
from grmpipe.run.build.start_grm import LogOf
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.scheduler.routing.rate_limits import RateLimits
from grmpipe.scheduler.routing.scorers import ScorerPool
from grmpipe.validate.models import FoundScalarModel, MetaRmModel
from grmpipe.validate.prepare import Prepared

META_RM = "meta_rm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarModels:
    """The started reward models of scalar judges.

    by_role: all of them.  pools: those with scorers here.  endpoints: clients of the others.
    """

    by_role: dict[str, ScalarModel]
    pools: tuple[ScorerPool, ...]
    endpoints: tuple[RemoteScorer, ...]

    async def close(self) -> None:
        for endpoint in self.endpoints:
            await endpoint.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerRole:
    """A role of scorers, and the model that each of them loads.

    max_replacements: dead scorers that the run replaces.  max_batch_tokens: of one forward pass.
    """

    name: str
    path: str
    dtype: str
    device: str
    max_batch_tokens: int
    max_replacements: int


async def start_scorer_pool(cluster: Cluster, role: ScorerRole, events: EventSink) -> ScorerPool:
    """Start a process on each seat of the role, as one scorer."""
    from grmpipe.models.engines.scorer import ScalarScorer, ScorerSpec  # late: it imports torch

    spec = ScorerSpec(path=role.path, dtype=role.dtype, device=role.device, max_batch_tokens=role.max_batch_tokens)
    members = await cluster.start_members(role.name, functools.partial(ScalarScorer, spec), meet=False)
    return ScorerPool(
        role.name,
        members,
        restart=functools.partial(cluster.restart_member, role.name),
        max_replacements=role.max_replacements,
        max_batch_tokens=role.max_batch_tokens,
        events=events,
    )


async def start_scalar_models(
    cluster: Cluster | None, prepared: Prepared, events: EventSink, requests: LogOf
) -> ScalarModels:
    """Start the scorers of all reward models that judges ask. cluster: None if all are behind endpoints."""
    found = prepared.scalars
    here = [one for one in found if one.engine.endpoint is None]
    endpoints = {one.model.name: connect_scorer(one, prepared, requests) for one in found if one not in here}
    pools: dict[str, ScorerPool] = {}
    if cluster is not None:
        started = await asyncio.gather(
            *(start_scorer_pool(cluster, scorer_role(one, prepared), events) for one in here)
        )
        pools = {pool.role: pool for pool in started}
    scorers: dict[str, Scorer] = {name: LoggedScorer(pool, requests(name)) for name, pool in pools.items()}
    scorers |= endpoints
    return ScalarModels(
        by_role={
            one.model.name: ScalarModel(
                scorer=scorers[one.model.name],
                renderer=one.model.renderer,
                context_tokens=one.model.context_tokens,
            )
            for one in found
        },
        pools=tuple(pools.values()),
        endpoints=tuple(endpoints.values()),
    )


def scorer_role(one: FoundScalarModel, prepared: Prepared) -> ScorerRole:
    """The role of a reward model with scorers here. Of several judges that ask it the largest batch counts."""
    config, name = prepared.config, one.model.name
    asking = [judge for judge in config.asked.scalar.values() if judge.model == name]
    return ScorerRole(
        name=name,
        path=one.model.path,
        dtype=config.models[name].dtype,
        device=prepared.roles[name].device,
        max_batch_tokens=max(judge.scalar.max_batch_tokens for judge in asking),
        max_replacements=config.slots.health.max_replacements,
    )


def connect_scorer(one: FoundScalarModel, prepared: Prepared, requests: LogOf) -> RemoteScorer:
    """The client of a reward model behind an endpoint."""
    name, endpoint = one.model.name, one.engine.endpoint
    assert endpoint is not None
    limits = RateLimits(requests_per_minute=endpoint.requests_per_minute, tokens_per_minute=endpoint.tokens_per_minute)
    model = prepared.config.models[name]
    use = EndpointUse(
        model_key=model.key,
        option_key=make_option_key(model, one.engine),
        limits=limits,
        requests=requests(name),
    )
    return endpoint.connect_scorer(model, use)


async def start_meta_rm(cluster: Cluster, prepared: Prepared, events: EventSink) -> ScorerPool | None:
    """Start a process on each seat of the role, as one scorer. None if no vote uses a meta-RM."""
    config, meta_rm = prepared.config, prepared.meta_rm
    if meta_rm is None:
        return None
    role = ScorerRole(
        name=META_RM,
        path=meta_rm.path,
        dtype=config.meta_rm.dtype,
        device=prepared.roles[META_RM].device,
        max_batch_tokens=config.meta_rm.max_batch_tokens,
        max_replacements=config.slots.health.max_replacements,
    )
    return await start_scorer_pool(cluster, role, events)


def make_meta_rm(meta_rm: MetaRmModel | None, scorers: ScorerPool | None, requests: LogOf) -> MetaRm | None:
    """The meta-RM for votes."""
    if meta_rm is None or scorers is None:
        return None
    return MetaRm(scorer=LoggedScorer(scorers, requests(META_RM)), context_tokens=meta_rm.context_tokens)
