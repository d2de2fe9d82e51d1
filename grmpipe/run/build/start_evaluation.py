"""Prepared evaluation -> started components: the engines of policy and judges, and environments. Nothing learns."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.run_config import RunConfig
from grmpipe.judge.grm import Grm
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.run.build.engines import start_routers
from grmpipe.run.build.maintenance import Maintenance, make_maintenance
from grmpipe.run.build.make_judge import JudgeParts, make_judge
from grmpipe.run.build.start_cluster import start_cluster
from grmpipe.run.build.start_envs import Envs, start_envs
from grmpipe.run.build.start_grm import LogOf, connect_endpoints, find_grms
from grmpipe.run.build.start_scorers import ScalarModels, meta_rm_of, start_meta_rm, start_scalar_models
from grmpipe.types import Judge
from grmpipe.validate.evaluation import PreparedEvaluation
from models.types import ChatEngine
from scheduler.events import EventSink
from scheduler.processes.actors import Cluster
from scheduler.routing.router import Router


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationComponents:
    """The started components of an evaluation.

    cluster: None if all models are behind endpoints. envs: None if nothing is played.
    """

    cluster: Cluster | None
    routers: Mapping[str, Router]
    maintenance: Maintenance | None
    envs: Envs | None
    grms: Mapping[str, Grm]
    endpoints: tuple[ChatEngine, ...]
    scalars: ScalarModels
    meta_rm: MetaRm | None

    def judge(self, ready: PreparedEvaluation, config: RunConfig) -> Judge:
        """The judge under a configuration: that of the run, or the one under which a judge is measured."""
        prepared = ready.prepared.under(config)
        return make_judge(
            JudgeParts(prepared=prepared, grms=self.grms, meta_rm=self.meta_rm, scalars=self.scalars.by_role)
        )

    def background(self) -> dict[str, Coroutine[object, object, object]]:
        """Name in errors -> what runs next to the evaluation."""
        return {} if self.maintenance is None else self.maintenance.loops()

    async def close(self) -> None:
        if self.envs is not None:
            await self.envs.close()
        for endpoint in self.endpoints:
            await endpoint.close()
        await self.scalars.close()
        if self.cluster is not None:
            await self.cluster.shutdown()


async def start_evaluation(
    ready: PreparedEvaluation, events: EventSink, run_dir: Path, requests: LogOf
) -> EvaluationComponents:
    """Start all processes. On failure ends what was started.

    requests: of models that judge.
    """
    config, prepared = ready.config, ready.prepared
    is_local = bool(ready.models or config.judging.scorer_roles)
    cluster = await start_cluster(config, prepared.placement) if is_local else None
    endpoints = connect_endpoints(prepared.roles, requests)
    try:
        return await start_on(cluster, ready, endpoints, events, run_dir, requests)
    except BaseException:
        for endpoint in endpoints.values():
            await endpoint.close()
        if cluster is not None:
            await cluster.shutdown()
        raise


async def start_on(
    cluster: Cluster | None,
    ready: PreparedEvaluation,
    endpoints: Mapping[str, ChatEngine],
    events: EventSink,
    run_dir: Path,
    requests: LogOf,
) -> EvaluationComponents:
    config, prepared = ready.config, ready.prepared
    routers: Mapping[str, Router] = {}
    maintenance, meta_rm, envs = None, None, None
    if cluster is not None:
        served = await start_routers(cluster, prepared, events, ready.models)
        routers = served.routers
        maintenance = make_maintenance(prepared, served, None, {}, events)
        scorers = await start_meta_rm(cluster, prepared, events)
        meta_rm = meta_rm_of(prepared.meta_rm, scorers, requests)
    scalars = await start_scalar_models(cluster, prepared, events, requests)
    if ready.prompt_sets:
        assert cluster is not None, "a policy that plays has engines"
        envs = await start_envs(cluster, config, run_dir, events)
    stops = None if maintenance is None else maintenance.stops
    return EvaluationComponents(
        cluster=cluster,
        routers=routers,
        maintenance=maintenance,
        envs=envs,
        grms=find_grms(prepared, routers, endpoints, events, requests, stops),
        endpoints=tuple(endpoints.values()),
        scalars=scalars,
        meta_rm=meta_rm,
    )
