"""Starts the processes of the meta-RM, as one scorer. Trains nothing, votes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from grmpipe.config.roles import ResolvedRole
from grmpipe.config.run_config import RunConfig
from grmpipe.judge.logged_scorer import LoggedScorer
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.run.build.start_grm import LogOf
from grmpipe.run.build.start_scorers import ScorerRole, start_scorer_pool
from grmpipe.validate.meta_rm_model import MetaRmModel
from scheduler.events import EventSink
from scheduler.processes.actors import Cluster
from scheduler.routing.scorers import ScorerPool

ROLE = "meta_rm"


async def start_scorers(
    cluster: Cluster,
    meta_rm: MetaRmModel | None,
    config: RunConfig,
    roles: Mapping[str, ResolvedRole],
    events: EventSink,
) -> ScorerPool | None:
    """Start a process on each seat of the role, as one scorer. None if no vote uses a meta-RM."""
    if meta_rm is None:
        return None
    role = ScorerRole(
        name=ROLE,
        path=meta_rm.path,
        dtype=config.meta_rm.dtype,
        device=roles[ROLE].device,
        max_batch_tokens=config.meta_rm.max_batch_tokens,
        max_replacements=config.health.max_replacements,
    )
    return await start_scorer_pool(cluster, role, events)


def meta_rm_of(meta_rm: MetaRmModel | None, scorers: ScorerPool | None, requests: LogOf) -> MetaRm | None:
    """The meta-RM for votes."""
    if meta_rm is None or scorers is None:
        return None
    return MetaRm(scorer=LoggedScorer(scorers, requests(ROLE)), context_tokens=meta_rm.context_tokens)
