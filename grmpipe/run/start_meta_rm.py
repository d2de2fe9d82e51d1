"""Starts the processes of the meta-RM, seen as one scorer. Trains nothing, votes nothing."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from grmpipe.config.roles import ResolvedRole
from grmpipe.config.run_config import RunConfig
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.validate.meta_rm_model import MetaModel
from models.engines.scorer import ScalarScorer, ScorerSpec
from scheduler.events import EventSink
from scheduler.processes.actors import Cluster
from scheduler.routing.scorers import ScorerPool

ROLE = "meta"


async def start_scorers(
    cluster: Cluster, meta: MetaModel | None, config: RunConfig, roles: Mapping[str, ResolvedRole], events: EventSink
) -> ScorerPool | None:
    """A process on each seat of the role, seen as one scorer; None where no meta-RM guides the vote."""
    if meta is None:
        return None
    spec = ScorerSpec(
        path=meta.path,
        dtype=config.meta.dtype,
        device=roles[ROLE].device,
        max_batch_tokens=config.meta.max_batch_tokens,
    )
    group = await cluster.start_group(ROLE, functools.partial(ScalarScorer, spec))
    return ScorerPool(
        ROLE,
        group,
        restart=functools.partial(cluster.restart_member, ROLE),
        max_replacements=config.health.max_replacements,
        max_batch_tokens=config.meta.max_batch_tokens,
        events=events,
    )


def guide_of(meta: MetaModel | None, scorers: ScorerPool | None) -> MetaRm | None:
    """What a vote asks."""
    if meta is None or scorers is None:
        return None
    return MetaRm(scorer=scorers, context_tokens=meta.context_tokens)
