"""Prepared run -> started components: processes, loaded models, maintenance of engines. Runs no loop."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.roles import Model
from grmpipe.judge.grm import Grm
from grmpipe.run.build.engines import ServingEngines, start_routers
from grmpipe.run.build.maintenance import Maintenance, make_maintenance
from grmpipe.run.build.registry import CLUSTERS, JudgeParts, make_judge
from grmpipe.run.build.start_critic import ROLE as CRITIC
from grmpipe.run.build.start_critic import start_critic
from grmpipe.run.build.start_envs import Envs, start_envs
from grmpipe.run.build.start_grm import LogOf, connect_endpoints, find_grms, make_policy_updates
from grmpipe.run.build.start_learner import (
    Learning,
    grm_learning,
    learner_spec,
    policy_learning,
    transport_between,
    weight_sync,
)
from grmpipe.run.build.start_meta_rm import meta_rm_of, start_scorers
from grmpipe.run.build.start_scorers import ScalarModels, start_scalar_models
from grmpipe.run.features.cotrain.grm_settings import TrainableGrm
from grmpipe.run.features.policy_updates import PolicyUpdates
from grmpipe.train.critic.critic import Critic
from grmpipe.train.critic.critic_group import CriticGroup
from grmpipe.train.learner.learner_group import LearnerGroup
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.make_learner import make_learner, make_offloading_learner
from grmpipe.train.learner.time_shared_learner import TimeSharedLearnerGroup
from grmpipe.types import Judge
from grmpipe.validate.prepare import Prepared
from grmpipe.validate.shared_folder import check_shared
from models.repeatable_kernels import choose_repeatable_kernels
from models.settings import ModelConfig
from models.types import ChatEngine
from scheduler.events import EventSink
from scheduler.processes.actors import Cluster
from scheduler.processes.serial_starts import SerialStarts
from scheduler.routing.router import Router
from scheduler.routing.scorers import ScorerPool
from scheduler.weights.weight_sync import WeightSync

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model that this run trains. learner_role: the role of its ranks, and its folder in a checkpoint."""

    name: str
    settings: ModelConfig
    ranks: LearnerGroup | CriticGroup
    learner_role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    """The started components of a run."""

    cluster: Cluster
    policy: Router
    learner: LearnerGroup
    judge: Judge
    sync: WeightSync
    maintenance: Maintenance
    grms: Mapping[str, Grm]  # that judges ask, by role
    endpoints: tuple[ChatEngine, ...]  # of models that judge elsewhere
    scorers: tuple[ScorerPool, ...]  # of the meta-RM and of reward models
    scalars: ScalarModels  # that scalar judges ask
    trainable_grms: tuple[TrainableGrm, ...]
    policy_updates: PolicyUpdates  # of models that judge as the policy was
    critic: Critic | None  # for estimators that need values
    trained: tuple[TrainedModel, ...]
    envs: Envs

    def background(self) -> dict[str, Coroutine[object, object, object]]:
        """Name in errors -> what runs next to the flow."""
        loops = self.maintenance.loops()
        return loops if self.critic is None else loops | {"the values of the critic": self.critic.value_cache.run()}

    async def close(self) -> None:
        await self.envs.close()
        for endpoint in self.endpoints:
            await endpoint.close()
        await self.scalars.close()
        await self.cluster.shutdown()


async def start(prepared: Prepared, events: EventSink, run_dir: Path, requests: LogOf) -> RunComponents:
    """Start all processes, those on different GPUs at the same time. On failure ends what was started.

    requests: of models that judge.
    """
    if prepared.config.train.deterministic or prepared.config.engine.embedded.batch_invariant:
        choose_repeatable_kernels()
    made = await CLUSTERS[prepared.config.cluster.kind](prepared.config, prepared.placement)
    cluster = SerialStarts(made, prepared.placement)
    try:
        return await start_on(cluster, prepared, events, run_dir, requests)
    except BaseException:
        await cluster.shutdown()
        raise


async def start_on(
    cluster: Cluster, prepared: Prepared, events: EventSink, run_dir: Path, requests: LogOf
) -> RunComponents:
    config, roles = prepared.config, prepared.roles
    await check_shared(cluster, run_dir)
    learning = policy_learning(config, prepared.policy, roles)
    transport = transport_between(cluster, prepared, learning)
    spec = learner_spec(learning, roles, config.seed, transport, run_dir)
    start_all = start_time_shared if prepared.placement.time_sharing_roles else start_together
    learner, served = await start_all(cluster, prepared, learning, spec, events)
    sync = weight_sync(cluster, prepared, prepared.policy, learning, learner, transport)
    grms = await start_trainable_grms(cluster, prepared, served, run_dir)
    meta_rm = await start_scorers(cluster, prepared.meta_rm, config, roles, events)
    scalars = await start_scalar_models(cluster, prepared, events, requests)
    critic = await start_critic(cluster, prepared.critic, config, roles, events)
    updates = await make_policy_updates(prepared, served, learner, run_dir)
    syncs = {prepared.policy.name: sync} | {grm.model.name: grm.sync for grm in grms} | updates.syncs
    maintenance = make_maintenance(prepared, served, learner, syncs, events)
    endpoints = connect_endpoints(roles, requests)
    asked = find_grms(prepared, served.routers, endpoints, events, requests, maintenance.stops)
    return RunComponents(
        cluster=cluster,
        policy=served.routers[prepared.policy.name],
        learner=learner,
        judge=make_judge(
            JudgeParts(
                prepared=prepared,
                grms=asked,
                meta_rm=meta_rm_of(prepared.meta_rm, meta_rm, requests),
                scalars=scalars.by_role,
            )
        ),
        sync=sync,
        maintenance=maintenance,
        grms=asked,
        endpoints=tuple(endpoints.values()),
        scorers=(*scalars.pools, *(() if meta_rm is None else (meta_rm,))),
        scalars=scalars,
        trainable_grms=grms,
        policy_updates=updates,
        critic=critic,
        trained=tuple(trained_models(learning, learner, grms, critic)),
        envs=await start_envs(cluster, config, run_dir, events),
    )


def trained_models(
    learning: Learning, learner: LearnerGroup, grms: Sequence[TrainableGrm], critic: Critic | None
) -> Iterator[TrainedModel]:
    """The policy, and the models that are trained next to it."""
    policy = learning.role
    yield TrainedModel(name=policy.name, settings=policy.model, ranks=learner, learner_role=learning.learner)
    if critic is not None:
        yield TrainedModel(name=CRITIC, settings=policy.model, ranks=critic.ranks, learner_role=CRITIC)
    for grm in grms:
        yield TrainedModel(name=grm.model.name, settings=grm.settings, ranks=grm.learner, learner_role=grm.learner_role)


async def start_together(
    cluster: Cluster, prepared: Prepared, learning: Learning, spec: LearnerSpec, events: EventSink
) -> tuple[LearnerGroup, ServingEngines]:
    """Start learner and engines at the same time; on a shared GPU the learner first."""
    ranks, served = await asyncio.gather(
        cluster.start_group(learning.learner, functools.partial(make_learner, spec)),
        start_routers(cluster, prepared, events),
    )
    return LearnerGroup(ranks, learning.train.parallel.cp), served


async def start_time_shared(
    cluster: Cluster, prepared: Prepared, learning: Learning, spec: LearnerSpec, events: EventSink
) -> tuple[LearnerGroup, ServingEngines]:
    """Start the learner first, which then frees the device for the engines."""
    ranks = await cluster.start_group(learning.learner, functools.partial(make_offloading_learner, spec))
    learner = TimeSharedLearnerGroup(ranks, learning.train.parallel.cp)
    await learner.keep_on_device("nothing")
    return learner, await start_routers(cluster, prepared, events)


async def start_trainable_grms(
    cluster: Cluster, prepared: Prepared, served: ServingEngines, run_dir: Path
) -> tuple[TrainableGrm, ...]:
    """Start the ranks of the GRMs that are trained next to the policy."""
    trained = [grm for grm in prepared.grms if prepared.roles.served[grm.name].learner is not None]
    return tuple(
        await asyncio.gather(
            *(start_trainable_grm(cluster, prepared, grm, served.routers[grm.name], run_dir) for grm in trained)
        )
    )


async def start_trainable_grm(
    cluster: Cluster, prepared: Prepared, grm: Model, engines: Router, run_dir: Path
) -> TrainableGrm:
    learning = grm_learning(prepared.config, grm, prepared.roles)
    transport = transport_between(cluster, prepared, learning)
    spec = learner_spec(learning, prepared.roles, prepared.config.seed, transport, run_dir)
    ranks = await cluster.start_group(learning.learner, functools.partial(make_learner, spec))
    learner = LearnerGroup(ranks, learning.train.parallel.cp)
    sync = weight_sync(cluster, prepared, grm, learning, learner, transport)
    return TrainableGrm(
        model=grm,
        settings=learning.role.model,
        engines=engines,
        learner=learner,
        learner_role=learning.learner,
        sync=sync,
    )
