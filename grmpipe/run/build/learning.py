"""The learner of a model of a run: what its ranks are started with, and the start."""

import functools
import logging
from pathlib import Path

from grmpipe.config.critic import critic_train
from grmpipe.config.model_training import find_training
from grmpipe.config.run_config import RunConfig
from grmpipe.models.weights.transports import transport_kind
from grmpipe.roles.find_models import CRITIC
from grmpipe.roles.role_placement import resolve_transport
from grmpipe.roles.roles import Model, Roles, ServedRole
from grmpipe.run.prepare import Prepared
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.make_learner import make_learner, make_offloading_learner
from grmpipe.train.learner.time_shared_learner import TimeSharedLearnerRanks

log = logging.getLogger(__name__)


def learner_spec(config: RunConfig, roles: Roles, model: Model, transport: str, run_dir: Path) -> LearnerSpec:
    """What each rank of the learner of a served model is started with."""
    role, training, folder = roles.served[model.name], find_training(config, model.name), run_dir.absolute()
    return LearnerSpec(
        model_path=model.path,
        train=training.train,
        algorithm=training.algorithm,
        max_new_tokens=training.max_new_tokens,
        device=roles[name_learner(role)].device,
        sync_dtype=role.dtype,
        bucket_bytes=role.sync.bucket_mb << 20,
        checkpoint_names=role.engine.checkpoint_names,
        transport=transport,
        sync_dir=str(folder / f"{training.prefix}weights") if transport_kind(transport).folder else "",
        temperature=training.temperature,
        first_version=training.first_version,
        lora=role.model.lora,
        adapter_dir=str(folder / f"{training.prefix}adapter"),
        seed=config.seed,
    )


def name_learner(role: ServedRole) -> str:
    """The role of the ranks that train it."""
    assert role.learner is not None, f"{role.name} doesn't learn"
    return role.learner


def transport_between(cluster: Cluster, prepared: Prepared, role: ServedRole) -> str:
    """The transport of a trained model's weights, now that its machines are known."""
    same_machine = len(cluster.machines(name_learner(role)) | cluster.machines(role.model.host)) == 1
    transport = resolve_transport(role, prepared.config, prepared.placement, same_machine=same_machine)
    log.info("weights are sent to the engines of %s by %s", role.name, transport)
    return transport


async def start_learner(
    cluster: Cluster, prepared: Prepared, role: ServedRole, transport: str, run_dir: Path
) -> LearnerRanks:
    """Start the ranks of a model whose engines get their weights. In a time-shared pool they then free the device."""
    learner, model = name_learner(role), prepared.models[role.name]
    spec = learner_spec(prepared.config, prepared.roles, model, transport, run_dir)
    cp = spec.train.parallel.cp
    if not prepared.placement.is_time_shared(learner):
        return LearnerRanks(await cluster.start_members(learner, functools.partial(make_learner, spec)), cp)
    ranks = await cluster.start_members(learner, functools.partial(make_offloading_learner, spec))
    sharing = TimeSharedLearnerRanks(ranks, cp)
    await sharing.keep_on_device("nothing")
    return sharing


async def start_critic(cluster: Cluster, prepared: Prepared, events: EventSink) -> CriticLearnerRanks:
    """Start the ranks of the critic, which reads the policy's tokens."""
    from grmpipe.train.critic.critic_learner import CriticLearner, CriticSpec  # late: it imports torch

    config = prepared.config
    spec = CriticSpec(
        model_path=prepared.models[CRITIC].path,
        tokenizer_path=prepared.policy.path,
        train=critic_train(config.critic, config.train),
        device=prepared.roles[CRITIC].device,
        value_clip=config.critic.value_clip,
        updates_per_batch=config.critic.updates(config.algorithm, config.train),
    )
    actors = await cluster.start_members(CRITIC, functools.partial(CriticLearner, spec))
    return CriticLearnerRanks(actors, events, config.critic.parallel.cp)
