"""Starts the scorers of a role, which has a scalar model, or connects its endpoint. Judges nothing, votes nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from models.engines.engine_kind import AnyEngine
from models.settings import ModelConfig
from models.types import RemoteScorer
from scheduler.events import EventSink
from scheduler.processes.actors import Cluster
from scheduler.routing.rate_limits import RateLimits
from scheduler.routing.scorers import ScorerPool


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
    from models.engines.scorer import ScalarScorer, ScorerSpec  # late: it imports torch

    spec = ScorerSpec(path=role.path, dtype=role.dtype, device=role.device, max_batch_tokens=role.max_batch_tokens)
    group = await cluster.start_group(role.name, functools.partial(ScalarScorer, spec))
    return ScorerPool(
        role.name,
        group,
        restart=functools.partial(cluster.restart_member, role.name),
        max_replacements=role.max_replacements,
        max_batch_tokens=role.max_batch_tokens,
        events=events,
    )


def connect_scorer(key: str, model: ModelConfig, engine: AnyEngine) -> RemoteScorer:
    """The client of an endpoint that scores. key: the configuration's section of the model."""
    endpoint = engine.endpoint
    per_minute = (0, 0) if endpoint is None else (endpoint.requests_per_minute, endpoint.tokens_per_minute)
    limits = RateLimits(requests_per_minute=per_minute[0], tokens_per_minute=per_minute[1])
    return engine.connect_scorer(key, model, limits)
