"""Starts the ranks of a trained model, and makes the sync of its weights to its engines. Runs no loop, trains
nothing.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.critic import policy_train
from grmpipe.config.roles import Model, Roles, ServedRole
from grmpipe.config.run_config import RunConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.run.build.engines import probe_of
from grmpipe.run.features.cotrain.grm_settings import grm_algorithm, grm_train
from grmpipe.train.learner.learner_group import LearnerGroup
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.validate.prepare import Prepared
from grmpipe.validate.weight_route import transport_of
from models.weights.transports import transport_kind
from scheduler.processes.actors import Cluster
from scheduler.weights.weight_sync import WeightSync

log = logging.getLogger(__name__)


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
    cotrain, judge = config.trained_grms[grm.name], config.judge_training(grm.name)
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
    transport = transport_of(learning.role, prepared.config, prepared.placement, same_machine=same_machine)
    log.info("weights are sent to the engines of %s by %s", learning.role.name, transport)
    return transport


def weight_sync(
    cluster: Cluster, prepared: Prepared, model: Model, learning: Learning, ranks: LearnerGroup, transport: str
) -> WeightSync:
    """The weight sync of a trained model."""
    role = learning.role
    return WeightSync(
        ranks,
        probe_of(model, prepared),
        role.sync,
        transport=transport,
        group=transport_kind(transport).group,
        ranks_per_engine=role.num_gpus,
        new_address=functools.partial(cluster.free_address, learning.learner),
    )
