"""Starts the ranks of the models that are trained, and makes the syncs of their weights to their engines."""

import asyncio
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.critic import critic_train, policy_train
from grmpipe.config.roles import Model, Roles, ServedRole
from grmpipe.config.run_config import RunConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.weights.transports import transport_kind
from grmpipe.run.build.engines import pick_probe, start_routers
from grmpipe.run.features.cotrain.grm_settings import TrainableGrm, grm_algorithm, grm_train
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.train.critic.critic import Critic
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.make_learner import make_learner, make_offloading_learner
from grmpipe.train.learner.time_shared_learner import TimeSharedLearnerRanks
from grmpipe.validate.prepare import Prepared
from grmpipe.validate.role_placement import resolve_transport

log = logging.getLogger(__name__)
CRITIC = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """A served role that is trained: the settings of its training, and the device of its engines.

    prefix: of its folders in the run's directory.
    """

    role: ServedRole
    model_path: str
    train: TrainConfig
    algorithm: AlgorithmConfig
    max_new_tokens: int
    temperature: float
    first_version: int = 0
    prefix: str = ""

    @property
    def learner(self) -> str:
        """The role of its ranks."""
        assert self.role.learner is not None, f"{self.role.name} doesn't learn"
        return self.role.learner


def policy_learning(config: RunConfig, policy: Model, roles: Roles) -> Learning:
    return Learning(
        role=roles.served[policy.name],
        model_path=policy.path,
        train=policy_train(config.critic, config.train),
        algorithm=config.algorithm,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        first_version=config.critic.warmup_steps if config.critic.enabled else 0,
    )


def grm_learning(config: RunConfig, grm: Model, roles: Roles) -> Learning:
    cotrain, judge = config.trained_grms[grm.name], config.judging.find_training_judge(grm.name)
    return Learning(
        role=roles.served[grm.name],
        model_path=grm.path,
        train=grm_train(config.train, cotrain),
        algorithm=grm_algorithm(cotrain),
        max_new_tokens=judge.max_new_tokens,
        temperature=judge.temperature,
        prefix=f"{grm.name}_",
    )


def learner_spec(learning: Learning, roles: Roles, seed: int, transport: str, run_dir: Path) -> LearnerSpec:
    role, folder = learning.role, run_dir.absolute()
    return LearnerSpec(
        model_path=learning.model_path,
        train=learning.train,
        algorithm=learning.algorithm,
        max_new_tokens=learning.max_new_tokens,
        device=roles[learning.learner].device,
        sync_dtype=role.dtype,
        bucket_bytes=role.sync.bucket_mb << 20,
        checkpoint_names=role.engine.checkpoint_names,
        transport=transport,
        sync_dir=str(folder / f"{learning.prefix}weights") if transport_kind(transport).folder else "",
        temperature=learning.temperature,
        first_version=learning.first_version,
        lora=role.model.lora,
        adapter_dir=str(folder / f"{learning.prefix}adapter"),
        seed=seed,
    )


def transport_between(cluster: Cluster, prepared: Prepared, learning: Learning) -> str:
    """The transport of a trained model's weights, now that its machines are known."""
    same_machine = len(cluster.machines(learning.learner) | cluster.machines(learning.role.name)) == 1
    transport = resolve_transport(learning.role, prepared.config, prepared.placement, same_machine=same_machine)
    log.info("weights are sent to the engines of %s by %s", learning.role.name, transport)
    return transport


def weight_sync(
    cluster: Cluster, prepared: Prepared, model: Model, learning: Learning, ranks: LearnerRanks, transport: str
) -> WeightSync:
    """The weight sync of a trained model."""
    role = learning.role
    return WeightSync(
        ranks,
        pick_probe(model, prepared),
        role.sync,
        transport=transport,
        group=transport_kind(transport).group,
        ranks_per_engine=role.num_gpus,
        new_address=functools.partial(cluster.free_address, learning.learner),
    )


async def start_together(
    cluster: Cluster, prepared: Prepared, learning: Learning, spec: LearnerSpec, events: EventSink
) -> tuple[LearnerRanks, dict[str, Router]]:
    """Start learner and engines at the same time; on a shared GPU the learner first."""
    ranks, routers = await asyncio.gather(
        cluster.start_members(learning.learner, functools.partial(make_learner, spec)),
        start_routers(cluster, prepared, events),
    )
    return LearnerRanks(ranks, learning.train.parallel.cp), routers


async def start_time_shared(
    cluster: Cluster, prepared: Prepared, learning: Learning, spec: LearnerSpec, events: EventSink
) -> tuple[LearnerRanks, dict[str, Router]]:
    """Start the learner first, which then frees the device for the engines."""
    ranks = await cluster.start_members(learning.learner, functools.partial(make_offloading_learner, spec))
    learner = TimeSharedLearnerRanks(ranks, learning.train.parallel.cp)
    await learner.keep_on_device("nothing")
    return learner, await start_routers(cluster, prepared, events)


async def start_trainable_grms(
    cluster: Cluster, prepared: Prepared, routers: Mapping[str, Router], run_dir: Path
) -> tuple[TrainableGrm, ...]:
    """Start the ranks of the GRMs that are trained next to the policy."""
    trained = [grm for grm in prepared.grms if prepared.roles.served[grm.name].learner is not None]
    return tuple(
        await asyncio.gather(
            *(start_trainable_grm(cluster, prepared, grm, routers[grm.name], run_dir) for grm in trained)
        )
    )


async def start_trainable_grm(
    cluster: Cluster, prepared: Prepared, grm: Model, engines: Router, run_dir: Path
) -> TrainableGrm:
    learning = grm_learning(prepared.config, grm, prepared.roles)
    transport = transport_between(cluster, prepared, learning)
    spec = learner_spec(learning, prepared.roles, prepared.config.seed, transport, run_dir)
    ranks = await cluster.start_members(learning.learner, functools.partial(make_learner, spec))
    learner = LearnerRanks(ranks, learning.train.parallel.cp)
    sync = weight_sync(cluster, prepared, grm, learning, learner, transport)
    return TrainableGrm(
        model=grm,
        settings=learning.role.model,
        engines=engines,
        learner=learner,
        learner_role=learning.learner,
        sync=sync,
    )


async def start_critic(cluster: Cluster, prepared: Prepared, events: EventSink) -> Critic | None:
    """Start the critic. None if no estimator needs one."""
    config, model = prepared.config, prepared.critic
    if model is None:
        return None
    from grmpipe.train.critic.critic_learner import CriticLearner, CriticSpec  # late: it imports torch

    spec = CriticSpec(
        model_path=model.path,
        tokenizer_path=model.tokenizer_path,
        train=critic_train(config.critic, config.train),
        device=prepared.roles[CRITIC].device,
        value_clip=config.critic.value_clip,
        updates_per_batch=config.critic.updates(config.algorithm, config.train),
    )
    actors = await cluster.start_members(CRITIC, functools.partial(CriticLearner, spec))
    ranks = CriticLearnerRanks(actors, events, config.critic.parallel.cp)
    return Critic(
        ranks,
        config.critic,
        config.train,
        config.algorithm,
        config.rollout.max_new_tokens,
        config.seed,
        mask_truncated=config.rollout.truncated == "mask",
    )
