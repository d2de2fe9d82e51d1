"""Prepared run -> started components: processes, loaded models, maintenance of engines.

    start_cluster -> start_learners, engines -> maintenance -> start_serving (scorers, environments, GRMs) -> make_judge

Of these compose_pipeline makes the policy's pipeline, from the episodes of make_play; make_evaluator the evaluations;
run_features what looks at each step. An evaluation has what start_serving starts, and nothing that learns.
"""

from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grmpipe.models.settings import ModelConfig
from grmpipe.run.build.maintenance import make_maintenance
from grmpipe.run.build.start_cluster import start_cluster
from grmpipe.run.build.start_grm import LogOf, make_policy_updates
from grmpipe.run.build.start_learners import (
    CRITIC,
    Learning,
    learner_spec,
    policy_learning,
    start_critic,
    start_time_shared,
    start_together,
    start_trainable_grms,
    transport_between,
    weight_sync,
)
from grmpipe.run.build.start_serving import MACHINES, Serving, describe_start, end_on_failure, start_serving
from grmpipe.run.features.cotrain.grm_settings import TrainableGrm
from grmpipe.run.features.policy_updates import PolicyUpdates
from grmpipe.run.observers import Observers
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.train.critic.critic import Critic
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.types import Judge
from grmpipe.validate.machines import check_shared
from grmpipe.validate.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model that this run trains. learner_role: the role of its ranks, and its folder in a checkpoint."""

    name: str
    settings: ModelConfig
    ranks: LearnerRanks | CriticLearnerRanks
    learner_role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents(Serving):
    """The started components of a run that trains."""

    policy: Router
    learner: LearnerRanks
    judge: Judge
    sync: WeightSync
    trainable_grms: tuple[TrainableGrm, ...]
    policy_updates: PolicyUpdates  # of models that judge as the policy was
    critic: Critic | None  # for estimators that need values
    trained: tuple[TrainedModel, ...]

    def background(self) -> dict[str, Coroutine[object, object, object]]:
        loops = self.maintenance.loops()
        return loops if self.critic is None else loops | {"the values of the critic": self.critic.value_cache.run()}


async def start(prepared: Prepared, observers: Observers, run_dir: Path, wait_s: float = 0.0) -> RunComponents:
    """Start all processes, those on different GPUs at the same time. On failure ends what was started.

    wait_s: how long it may take until the machines have room.
    """
    with observers.progress.show_while(f"starting: {MACHINES}"):
        cluster = await start_cluster(prepared.config, prepared.placement, wait_s)
    async with end_on_failure(cluster):
        with observers.progress.show_while(describe_start(cluster)):
            return await start_on(cluster, prepared, observers.timeline, run_dir, observers.requests.of_model)


async def start_on(
    cluster: Cluster, prepared: Prepared, events: EventSink, run_dir: Path, requests: LogOf
) -> RunComponents:
    config, roles = prepared.config, prepared.roles
    await check_shared(cluster, run_dir)
    learning = policy_learning(config, prepared.policy, roles)
    transport = transport_between(cluster, prepared, learning)
    spec = learner_spec(learning, roles, config.seed, transport, run_dir)
    start_all = start_time_shared if prepared.placement.time_sharing_roles else start_together
    learner, routers = await start_all(cluster, prepared, learning, spec, events)
    sync = weight_sync(cluster, prepared, prepared.policy, learning, learner, transport)
    grms = await start_trainable_grms(cluster, prepared, routers, run_dir)
    critic = await start_critic(cluster, prepared, events)
    updates = await make_policy_updates(prepared, routers, learner, run_dir)
    syncs = {prepared.policy.name: sync} | {grm.model.name: grm.sync for grm in grms} | updates.syncs
    maintenance = make_maintenance(cluster, prepared, routers, learner, syncs, events)
    serving = await start_serving(cluster, prepared, routers, maintenance, events, run_dir, requests)
    return RunComponents(
        cluster=cluster,
        routers=serving.routers,
        maintenance=maintenance,
        grms=serving.grms,
        endpoints=serving.endpoints,
        scorers=serving.scorers,
        scalars=serving.scalars,
        meta_rm=serving.meta_rm,
        teachers=serving.teachers,
        envs=serving.envs,
        policy=routers[prepared.policy.name],
        learner=learner,
        judge=serving.judge_for(prepared),
        sync=sync,
        trainable_grms=grms,
        policy_updates=updates,
        critic=critic,
        trained=tuple(list_trained_models(learning, learner, grms, critic)),
    )


def list_trained_models(
    learning: Learning, learner: LearnerRanks, grms: Sequence[TrainableGrm], critic: Critic | None
) -> Iterator[TrainedModel]:
    """The policy, and the models that are trained next to it."""
    policy = learning.role
    yield TrainedModel(name=policy.name, settings=policy.model, ranks=learner, learner_role=learning.learner)
    if critic is not None:
        yield TrainedModel(name=CRITIC, settings=policy.model, ranks=critic.ranks, learner_role=CRITIC)
    for grm in grms:
        yield TrainedModel(name=grm.model.name, settings=grm.settings, ranks=grm.learner, learner_role=grm.learner_role)
