"""Prepared run -> its running parts: processes, loaded models, environments, the maintenance of engines.

    start_cluster -> engines and learners -> maintenance -> scorers, environments, endpoints -> the judge

Of these compose_pipeline makes the policy's pipeline, from the episodes of make_play; make_evaluator the evaluations;
run_features what looks at each step. An evaluation starts the same, and nothing that learns.
"""

import functools
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from grmpipe.config.keys.entry_names import POLICY, REWARD
from grmpipe.config.run_config import ConfigError
from grmpipe.envs.episode_slots import EpisodeSlots
from grmpipe.judge.teaching import Teacher
from grmpipe.models.types import EngineDenied
from grmpipe.observe.progress import Describe, time_text
from grmpipe.roles.find_models import CRITIC
from grmpipe.roles.machines import check_shared
from grmpipe.run.build.maintenance import Maintenance, make_maintenance
from grmpipe.run.build.make_judge import make_judge, make_named, make_teachers
from grmpipe.run.build.start_cluster import start_cluster
from grmpipe.run.build.start_envs import Envs, start_envs, start_judge_tools
from grmpipe.run.build.start_models import (
    connect_judging,
    describe_starts,
    list_models,
    make_policy_updates,
    start_engines_and_learners,
    start_scorers,
)
from grmpipe.run.features.policy_updates import PolicyUpdates
from grmpipe.run.observers import Observers
from grmpipe.run.prepare import Prepared
from grmpipe.run.run_model import RunModel
from grmpipe.run_dir.identity import read_run_id
from grmpipe.scheduler.processes.actors import Cluster, InProcessCluster
from grmpipe.train.critic.critic import Critic
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.types import Judge

MACHINES = "the machines and their processes"  # what a start waits for first


@dataclass(frozen=True, kw_only=True)
class Running:
    """The running parts of a run.

    models:  by role.
    updates: brings the policy's weights to models that judge as the policy was; None: nothing learns.
    critic:  for estimators that need values.
    """

    prepared: Prepared
    cluster: Cluster
    models: Mapping[str, RunModel]
    maintenance: Maintenance
    envs: Envs
    tools: AsyncExitStack
    updates: PolicyUpdates | None = None
    critic: Critic | None = None
    _named: dict[str, Judge] = field(default_factory=dict)

    @property
    def policy(self) -> RunModel:
        return self.models[POLICY]

    @property
    def policy_updates(self) -> PolicyUpdates:
        assert self.updates is not None, "no policy learns here"
        return self.updates

    @property
    def trained(self) -> Sequence[RunModel]:
        """The models that learn."""
        return [model for model in self.models.values() if model.ranks is not None]

    @functools.cached_property
    def judge(self) -> Judge:
        return make_judge(self.prepared, self.models)

    @functools.cached_property
    def watchers(self) -> dict[str, Judge]:
        """The judges that only watch, by name."""
        return {name: self.find_judge(name) for name in self.prepared.config.watchers}

    def find_judge(self, name: str) -> Judge:
        """The judge of the run for `reward`, or one of its judges and compositions alone."""
        if name not in self._named:
            self._named[name] = self.judge if name == REWARD else make_named(self.prepared, self.models, name)
        return self._named[name]

    @functools.cached_property
    def teachers(self) -> dict[str, Teacher]:
        """The policy's teachers, by role."""
        scoring = {name: model.teacher for name, model in self.models.items() if model.teacher is not None}
        return make_teachers(self.prepared.config, scoring, self.prepared.policy.renderer)

    def background(self) -> dict[str, Coroutine[object, object, object]]:
        """Name in errors -> what runs next to the task's own work."""
        loops = self.maintenance.loops()
        return loops if self.critic is None else loops | {"the values of the critic": self.critic.value_cache.run()}

    async def close(self) -> None:
        await self.envs.close()
        await self.tools.aclose()
        for model in self.models.values():
            await model.close()
        await self.cluster.shutdown()


async def start(
    prepared: Prepared, observers: Observers, run_dir: Path, wait_s: float = 0.0, *, plays: bool = True
) -> Running:
    """Start all processes, those on different GPUs at the same time. On failure ends what was started.

    wait_s: how long it may take until the machines have room.
    plays:  whether the policy plays; an evaluation of a judge has no environments.
    """
    with observers.progress.show_while(f"starting: {MACHINES}"):
        cluster: Cluster
        if prepared.placement.seats:
            cluster = await start_cluster(prepared.config, prepared.placement, wait_s)
        else:  # no model runs here: no Ray is started
            cluster = InProcessCluster(prepared.placement)
    async with end_on_failure(cluster):
        with observers.progress.show_while(describe_start(cluster)):
            config, events, budget = prepared.config, observers.timeline, observers.budget
            models = list_models(prepared)
            if learns := bool(config.learners):
                await check_shared(cluster, run_dir)
            await start_engines_and_learners(cluster, prepared, models, events, run_dir)
            for line in describe_starts(models):
                observers.note(line)
            learner = models[POLICY].learner if learns else None
            updates = None if learner is None else await make_policy_updates(prepared, models, learner, run_dir)
            maintenance = make_maintenance(cluster, prepared, models, learner, events, budget.clocks)
            await start_scorers(cluster, prepared, models, events, budget)
            envs = await start_envs(cluster, config, run_dir, events) if plays else Envs(slots=EpisodeSlots())
            tools = await start_judge_tools(prepared, models, run_dir, events)
            connect_judging(prepared, models, events, budget, maintenance.stops, read_run_id(run_dir))
            return Running(
                prepared=prepared,
                cluster=cluster,
                models=models,
                maintenance=maintenance,
                envs=envs,
                tools=tools,
                updates=updates,
                critic=make_critic(prepared, models),
            )


def make_critic(prepared: Prepared, models: Mapping[str, RunModel]) -> Critic | None:
    """The critic's side of a batch. None if no estimator needs one."""
    if CRITIC not in models:
        return None
    config, ranks = prepared.config, models[CRITIC].ranks
    assert isinstance(ranks, CriticLearnerRanks)
    return Critic(
        ranks,
        config.critic,
        config.train,
        config.algorithm,
        config.rollout.max_new_tokens,
        config.seed,
        mask_truncated=config.rollout.truncated == "mask",
    )


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


@contextmanager
def refuse_denied() -> Iterator[None]:
    """Context: an endpoint that denies its first requests is a mistake in the configuration, a ConfigError."""
    try:
        yield
    except EngineDenied as error:
        if error.has_served:
            raise
        raise ConfigError(str(error)) from error
