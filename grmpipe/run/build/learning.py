"""How a model of a run is trained: the settings of its learner, and its ranks."""

import functools
import logging
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.critic import critic_train, policy_train
from grmpipe.config.keys.entry_names import POLICY
from grmpipe.config.run_config import RunConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.weights.transports import transport_kind
from grmpipe.roles.find_models import CRITIC
from grmpipe.roles.role_placement import resolve_transport
from grmpipe.roles.roles import Model, Roles, ServedRole
from grmpipe.run.features.cotrain.grm_settings import grm_algorithm, grm_train
from grmpipe.run.prepare import Prepared
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.make_learner import make_learner, make_offloading_learner
from grmpipe.train.learner.time_shared_learner import TimeSharedLearnerRanks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """A served role that is trained: the settings of its training, and the device of its engines.

    prefix: begins the names of its folders in the run's directory.
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


def find_learning(config: RunConfig, model: Model, roles: Roles) -> Learning:
    """The policy learns by `train`, a GRM next to it by its own section."""
    role = roles.served[model.name]
    if (cotrain := config.trained_grms.get(model.name)) is not None:
        judge = config.judging.find_training_judge(model.name)
        return Learning(
            role=role,
            model_path=model.path,
            train=grm_train(config.train, cotrain),
            algorithm=grm_algorithm(cotrain),
            max_new_tokens=judge.max_new_tokens,
            temperature=judge.temperature,
            prefix=f"{model.name}_",
        )
    return Learning(
        role=role,
        model_path=model.path,
        train=policy_train(config.critic, config.train),
        algorithm=config.algorithm,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        first_version=config.critic.warmup_steps if config.critic.enabled else 0,
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


async def start_learner(
    cluster: Cluster, prepared: Prepared, learning: Learning, transport: str, run_dir: Path
) -> LearnerRanks:
    """Start the ranks of a model whose engines get their weights. In a time-shared pool they then free the device."""
    spec = learner_spec(learning, prepared.roles, prepared.config.seed, transport, run_dir)
    cp = learning.train.parallel.cp
    if learning.role.name != POLICY or not prepared.placement.time_sharing_roles:
        return LearnerRanks(await cluster.start_members(learning.learner, functools.partial(make_learner, spec)), cp)
    ranks = await cluster.start_members(learning.learner, functools.partial(make_offloading_learner, spec))
    learner = TimeSharedLearnerRanks(ranks, cp)
    await learner.keep_on_device("nothing")
    return learner


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
