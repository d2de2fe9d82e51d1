"""Prepared run -> what serves its requests: engines, scorers, endpoints, environments. Here nothing learns."""

from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from grmpipe.envs.episode_slots import EpisodeSlots
from grmpipe.judge.grm import Grm
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.judge.teaching import Teacher
from grmpipe.models.types import ChatEngine, RemoteTeacher
from grmpipe.observe.progress import Describe, time_text
from grmpipe.run.build.engines import start_routers
from grmpipe.run.build.maintenance import Maintenance, make_maintenance
from grmpipe.run.build.make_judge import JudgeResources, make_judge, make_teachers, make_watchers
from grmpipe.run.build.start_cluster import start_cluster
from grmpipe.run.build.start_envs import Envs, start_envs
from grmpipe.run.build.start_grm import LogOf, connect_endpoints, find_grms
from grmpipe.run.build.start_scorers import ScalarModels, make_meta_rm, start_meta_rm, start_scalar_models
from grmpipe.run.observers import Observers
from grmpipe.run_dir.identity import read_run_id
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import Cluster, InProcessCluster
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.routing.scorers import ScorerPool
from grmpipe.types import Judge
from grmpipe.validate.evaluation import PreparedEvaluation
from grmpipe.validate.prepare import Prepared

MACHINES = "the machines and their processes"  # what a start waits for first


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The started processes that answer requests, and what keeps them alive.

    grms: that judges ask, by role.  endpoints: of models elsewhere.
    scorers: of the meta-RM and of reward models.  scalars: that scalar judges ask.
    teachers: of the policy, by role.
    """

    cluster: Cluster
    routers: Mapping[str, Router]
    maintenance: Maintenance
    grms: Mapping[str, Grm]
    endpoints: tuple[ChatEngine | RemoteTeacher, ...]
    scorers: tuple[ScorerPool, ...]
    scalars: ScalarModels
    meta_rm: MetaRm | None
    teachers: Mapping[str, Teacher]
    envs: Envs

    def judge_for(self, prepared: Prepared) -> Judge:
        """The judge under a run's configuration."""
        return make_judge(self._resources_for(prepared))

    def watchers_for(self, prepared: Prepared) -> dict[str, Judge]:
        """The judges that only watch, by name."""
        return make_watchers(self._resources_for(prepared))

    def _resources_for(self, prepared: Prepared) -> JudgeResources:
        return JudgeResources(prepared=prepared, grms=self.grms, meta_rm=self.meta_rm, scalars=self.scalars.by_role)

    def background(self) -> dict[str, Coroutine[object, object, object]]:
        """Name in errors -> what runs next to the task's own work."""
        return self.maintenance.loops()

    async def close(self) -> None:
        await self.envs.close()
        for endpoint in self.endpoints:
            await endpoint.close()
        await self.scalars.close()
        await self.cluster.shutdown()


async def start_evaluation(ready: PreparedEvaluation, observers: Observers, run_dir: Path) -> Serving:
    """Start all processes of an evaluation. On failure ends what was started."""
    config, prepared, events = ready.config, ready.prepared, observers.timeline
    is_local = bool(ready.models or config.judging.scorer_roles)
    with observers.progress.show_while(f"starting: {MACHINES}"):
        cluster = await start_cluster(config, prepared.placement) if is_local else InProcessCluster(prepared.placement)
    async with end_on_failure(cluster):
        with observers.progress.show_while(describe_start(cluster)):
            routers = await start_routers(cluster, prepared, events, ready.models)
            maintenance = make_maintenance(cluster, prepared, routers, None, {}, events)
            requests, plays = observers.requests.of_model, bool(ready.prompt_sets)
            return await start_serving(cluster, prepared, routers, maintenance, events, run_dir, requests, plays=plays)


def describe_start(cluster: Cluster) -> Describe:
    """A function: what the start of a run waits for."""

    def describe(took_s: float) -> str:
        replicas = Counter(seat.role for seat in cluster.starting)
        loading = ", ".join(role if number == 1 else f"{role} ({number})" for role, number in replicas.items())
        return f"starting: {loading or 'processes'}  {time_text(took_s)}"

    return describe


@asynccontextmanager
async def end_on_failure(cluster: Cluster) -> AsyncIterator[None]:
    """Context: an error in it ends the processes."""
    try:
        yield
    except BaseException:
        await cluster.shutdown()
        raise


async def start_serving(
    cluster: Cluster,
    prepared: Prepared,
    routers: Mapping[str, Router],
    maintenance: Maintenance,
    events: EventSink,
    run_dir: Path,
    requests: LogOf,
    *,
    plays: bool = True,
) -> Serving:
    """Start what a run needs beside its engines, and connect the models behind endpoints. plays: the policy."""
    meta_rm = await start_meta_rm(cluster, prepared, events)
    scalars = await start_scalar_models(cluster, prepared, events, requests)
    envs = await start_envs(cluster, prepared.config, run_dir, events) if plays else Envs(slots=EpisodeSlots())
    remote = connect_endpoints(prepared.config, prepared.roles, requests, read_run_id(run_dir))
    return Serving(
        cluster=cluster,
        routers=routers,
        maintenance=maintenance,
        grms=find_grms(prepared, routers, remote.judging, events, requests, maintenance.stops),
        endpoints=remote.clients,
        scorers=(*scalars.pools, *(() if meta_rm is None else (meta_rm,))),
        scalars=scalars,
        meta_rm=make_meta_rm(prepared.meta_rm, meta_rm, requests),
        teachers=make_teachers(prepared.config, {**routers, **remote.teaching}, prepared.policy.renderer),
        envs=envs,
    )
