"""Checked parts -> running parts: processes up, models loaded, who keeps engines alive and current. Runs no loop."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.critic import policy_train
from grmpipe.config.roles import Roles
from grmpipe.config.run_config import RunConfig
from grmpipe.judge.grm import Grm, LocalGrm, RemoteGrm
from grmpipe.judge.markup import Markup
from grmpipe.run.cotrain.cotrain_parts import TrainableGrm, start_grm_learner, trainable_grm
from grmpipe.run.engines import ServingEngines, elastic_pools, start_routers
from grmpipe.run.registry import CLUSTERS, JUDGES
from grmpipe.run.start_critic import start_critic
from grmpipe.run.start_meta_rm import meta_rm_of, start_scorers
from grmpipe.run.start_time_share import time_share_of
from grmpipe.train.critic.critic import Critic
from grmpipe.train.learner.learner_group import LearnerGroup
from grmpipe.train.learner.learner_spec import LearnerSpec, make_learner, make_offloading_learner
from grmpipe.train.learner.time_shared_learner import TimeSharedLearnerGroup
from grmpipe.types import Judge
from grmpipe.validate.engines import context_limit_of
from grmpipe.validate.prepare import Prepared
from grmpipe.validate.shared_folder import check_shared
from grmpipe.validate.weight_route import transport_of
from models.types import ChatEngine, Engine
from models.weights.transports import transport_kind
from scheduler.clock import ActiveClock
from scheduler.events import EventSink
from scheduler.processes.actors import Cluster
from scheduler.processes.serial_starts import SerialStarts
from scheduler.routing.rate_limits import RateLimits
from scheduler.routing.router import Router
from scheduler.routing.scorers import ScorerPool
from scheduler.slots.elastic import ElasticPool
from scheduler.slots.health import RoleHealth
from scheduler.slots.time_share import TimeShare
from scheduler.weights.weight_sync import WeightSync

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    """The started parts."""

    cluster: Cluster
    policy: Router
    learner: LearnerGroup
    judge: Judge
    sync: WeightSync
    health: tuple[RoleHealth, ...]  # of the roles that have engines here
    elastic: tuple[ElasticPool, ...]
    share: TimeShare | None  # the time-shared pool of the learner
    outside: ChatEngine | None  # the judge's endpoint
    scorers: ScorerPool | None  # the meta-RM
    trainable_grm: TrainableGrm | None  # the GRM, where it learns too
    critic: Critic | None  # where advantages ask one

    def stops(self, clock: ActiveClock) -> None:
        """From now on this clock stands still while nobody could answer: a role is out, or it is the learner's
        phase."""
        for health in self.health:
            health.stops(clock)
        if self.share is not None:
            self.share.stops(clock)

    async def close(self) -> None:
        if self.outside is not None:
            await self.outside.close()
        await self.cluster.shutdown()


async def start(prepared: Prepared, events: EventSink, run_dir: Path) -> RunComponents:
    """Bring up all processes, those on GPUs of their own at the same time. On failure what was started is ended."""
    made = await CLUSTERS[prepared.config.cluster.kind](prepared.config, prepared.placement)
    cluster = SerialStarts(made, prepared.placement)
    try:
        return await start_on(cluster, prepared, events, run_dir)
    except BaseException:
        await cluster.shutdown()
        raise


async def start_on(cluster: Cluster, prepared: Prepared, events: EventSink, run_dir: Path) -> RunComponents:
    config, placement = prepared.config, prepared.placement
    await check_shared(cluster, run_dir)
    one_machine = len(cluster.machines("learner") | cluster.machines("policy")) == 1
    transport = transport_of(prepared.roles.served["policy"], config, placement, same_machine=one_machine)
    spec = learner_spec(config, prepared.policy.path, prepared.roles, transport, run_dir)
    learner, served = await (start_time_shared if placement.time_sharing_roles else start_together)(
        cluster, prepared, spec, events
    )
    grm_ranks = await start_grm_learner(cluster, prepared, run_dir)
    scorers = await start_scorers(cluster, prepared.meta_rm, config, prepared.roles, events)
    critic = await start_critic(cluster, prepared.critic, config, prepared.roles, events)
    sync = make_sync(prepared, learner, cluster, transport)
    learns_too = trainable_grm(prepared, cluster, grm_ranks, served.routers.get("grm"))
    syncs = {"policy": sync} | ({"grm": learns_too.sync} if learns_too is not None else {})
    outside, clock = remote_judge_engine(prepared.roles), ActiveClock()
    maintenance = start_maintenance(prepared, served, learner, syncs, clock, events)
    grm = grm_of(prepared, served.routers.get("grm"), outside, events, clock)
    return RunComponents(
        cluster=cluster,
        policy=served.routers["policy"],
        learner=learner,
        judge=JUDGES[config.judge.kind](prepared, grm, meta_rm_of(prepared.meta_rm, scorers)),
        sync=sync,
        health=maintenance.health,
        elastic=maintenance.elastic,
        share=maintenance.share,
        outside=outside,
        scorers=scorers,
        trainable_grm=learns_too,
        critic=critic,
    )


async def start_together(
    cluster: Cluster, prepared: Prepared, spec: LearnerSpec, events: EventSink
) -> tuple[LearnerGroup, ServingEngines]:
    """Learner and engines, all at the same time; on a GPU that they share the learner first."""
    ranks, served = await asyncio.gather(
        cluster.start_group("learner", functools.partial(make_learner, spec)), start_routers(cluster, prepared, events)
    )
    return LearnerGroup(ranks), served


async def start_time_shared(
    cluster: Cluster, prepared: Prepared, spec: LearnerSpec, events: EventSink
) -> tuple[LearnerGroup, ServingEngines]:
    """The learner first, which then makes room for the engines."""
    learner = TimeSharedLearnerGroup(
        await cluster.start_group("learner", functools.partial(make_offloading_learner, spec))
    )
    await learner.keep_on_device("nothing")
    return learner, await start_routers(cluster, prepared, events)


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    """Who replaces dead engines, moves slots, and time-shares the learner's pool."""

    health: tuple[RoleHealth, ...]
    elastic: tuple[ElasticPool, ...]
    share: TimeShare | None


def start_maintenance(
    prepared: Prepared,
    served: ServingEngines,
    learner: LearnerGroup,
    syncs: Mapping[str, WeightSync],
    clock: ActiveClock,
    events: EventSink,
) -> Maintenance:
    """syncs: of the roles that learn. `clock` times the GRM's answers: it stands still while nobody could give any."""
    bring_current = served.bring_current(syncs)
    elastic = elastic_pools(prepared, served, bring_current, syncs, events, learner.still)
    for pool in elastic:
        bring_current |= {role: functools.partial(pool.bring_current, role) for role in pool.slots_by_role}
        if "grm" in pool.slots_by_role:
            pool.stops("grm", clock)
    share, time_shared = None, prepared.placement.time_sharing_roles
    if isinstance(learner, TimeSharedLearnerGroup):
        share = time_share_of(prepared, served.routers, bring_current, learner, events)
        bring_current |= {role: functools.partial(share.bring_current, role) for role in time_shared}
        if "grm" in time_shared:
            share.stops(clock)
    config = prepared.config.health
    health = {
        role: RoleHealth(role, router, served.restart[role], config, bring_current[role], events)
        for role, router in served.routers.items()
    }
    if "grm" in health:
        health["grm"].stops(clock)
    return Maintenance(health=tuple(health.values()), elastic=elastic, share=share)


def make_sync(prepared: Prepared, learner: LearnerGroup, cluster: Cluster, transport: str) -> WeightSync:
    role = prepared.roles.served[prepared.policy.name]
    log.info("weights are sent to the policy's engines by %s", transport)
    return WeightSync(
        learner,
        prepared.policy.renderer.render(prepared.prompts.at(0).messages)[: role.sync.probe_tokens],
        role.sync,
        transport=transport,
        group=transport_kind(transport).group,
        ranks_per_engine=role.num_gpus,
        new_address=functools.partial(cluster.free_address, "learner"),
    )


def remote_judge_engine(roles: Roles) -> ChatEngine | None:
    """The client of a judge behind an endpoint; None where the judge is here, or a rule."""
    for role in roles.served.values():
        if (endpoint := role.engine.endpoint) is not None:
            limits = RateLimits(
                requests_per_minute=endpoint.requests_per_minute, tokens_per_minute=endpoint.tokens_per_minute
            )
            return role.engine.connect(role.name, role.model, limits)
    return None


def grm_of(
    prepared: Prepared, here: Engine | None, outside: ChatEngine | None, events: EventSink, clock: ActiveClock
) -> Grm | None:
    """What a generative judge asks; None where no model judges. `clock` times the answers of one that is here."""
    if outside is not None:
        role = prepared.roles.served["grm"]
        assert role.engine.endpoint is not None
        markup = Markup(role.engine.endpoint.chat_markup)
        return RemoteGrm(role.name, outside, context_limit_of(role, 0), events, markup)
    if here is None or (model := prepared.grm) is None:
        return None
    return LocalGrm(model.name, here, model.renderer, model.context_tokens, clock)


def learner_spec(config: RunConfig, model_path: str, roles: Roles, transport: str, run_dir: Path) -> LearnerSpec:
    policy = roles.served["policy"]
    return LearnerSpec(
        model_path=model_path,
        train=policy_train(config.critic, config.train),
        algorithm=config.algorithm,
        max_new_tokens=config.rollout.max_new_tokens,
        device=roles["learner"].device,
        sync_dtype=policy.dtype,
        bucket_bytes=config.sync.bucket_mb << 20,
        checkpoint_names=policy.engine.checkpoint_names,
        transport=transport,
        sync_dir=str(run_dir.absolute() / "weights") if transport_kind(transport).folder else "",
        temperature=config.rollout.temperature,
        first_version=config.critic.warmup_steps if config.critic.enabled else 0,
        lora=policy.model.lora,
        adapter_dir=str(run_dir.absolute() / "adapter"),
        seed=config.seed,
    )
