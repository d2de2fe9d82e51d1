"""RunConfig -> checked parts -> running parts. The only room that knows every other; it holds no loop of its own."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grmpipe.checks.engines import window_of
from grmpipe.checks.sections import section
from grmpipe.config import RunConfig
from grmpipe.cotrain.parts import Trainee, start_grm_learner, trainee
from grmpipe.critic.parts import ValuedJournal, start_critic
from grmpipe.elastic import Served, elastic_pools, start_routers
from grmpipe.engines import device_of, engine_config_of, sync_config_of, tensor_parallel_of
from grmpipe.envs.single_turn import SingleTurn
from grmpipe.evaluation.held_out import Evaluator
from grmpipe.flow import Parts, Trainer
from grmpipe.judge.fitness import JudgeFitness
from grmpipe.judge.generative import GenerativeJudge
from grmpipe.judge.grm import Grm, GrmHere, GrmOutside
from grmpipe.judge.hearing import OneByOne
from grmpipe.judge.lessons import LabelJudge, rule_of
from grmpipe.judge.meta import MetaScorer
from grmpipe.judge.mixed import MixedJudge
from grmpipe.judge.own import own_judge
from grmpipe.judge.rule import RuleJudge
from grmpipe.judge.watch import FailureGate
from grmpipe.meta.model import guide_of, start_scorers
from grmpipe.observers import Observers
from grmpipe.prepare import Prepared
from grmpipe.rollout.play import Play, Seat, play
from grmpipe.time_share import TrainerByTurns, begin_turn, time_share_of
from grmpipe.train.batch import BatchTrainer
from grmpipe.train.critic import Critic
from grmpipe.train.critic_settings import policy_train
from grmpipe.train.learner import Learner, LearnerSpec
from grmpipe.train.learner_by_turns import LearnerByTurns
from grmpipe.train.learner_group import LearnerGroup
from grmpipe.train.lending_learner import LendingLearner
from grmpipe.types import Env, Judge, Prompt, Rollout
from grmpipe.weight_route import transport_of
from models.engines.openai import OpenAIEngine
from models.settings import OpenAIConfig
from models.types import ChatEngine, Engine, SamplingParams
from scheduler.actors import Cluster, InProcessCluster
from scheduler.clock import ActiveClock
from scheduler.elastic import ElasticPool
from scheduler.events import EventSink
from scheduler.health import RoleHealth, push_to_living
from scheduler.placement import Placement
from scheduler.rate_limits import RateLimits
from scheduler.router import Router
from scheduler.scorers import ScorerPool
from scheduler.time_share import TimeShare
from scheduler.weight_sync import SyncReport, WeightSync

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The started parts."""

    cluster: Cluster
    policy: Router
    learner: LearnerGroup
    judge: Judge
    sync: WeightSync
    health: tuple[RoleHealth, ...]  # of the roles that have engines here
    elastic: tuple[ElasticPool, ...]
    share: TimeShare | None  # the turns of the learner's pool
    outside: OpenAIEngine | None  # the judge's endpoint
    scorers: ScorerPool | None  # the meta-RM
    trainee: Trainee | None  # the GRM, where it learns too
    critic: Critic | None  # where advantages ask one

    def stops(self, clock: ActiveClock) -> None:
        """From now on this clock stands still while nobody could answer: a role is out, or the learner has its turn."""
        for health in self.health:
            health.stops(clock)
        if self.share is not None:
            self.share.stops(clock)

    async def close(self) -> None:
        if self.outside is not None:
            await self.outside.close()
        await self.cluster.shutdown()


# -- tables: a new kind is a file and a row ------------------------------------------------------------------------


def generative_judge(prepared: Prepared, grm: Grm | None, meta: MetaScorer | None = None) -> Judge:
    assert grm is not None
    return GenerativeJudge(grm, prepared.config.judge, prepared.config.seed, meta, prepared.policy.renderer.decode)


def rule_judge(prepared: Prepared, grm: Grm | None, meta: MetaScorer | None = None) -> Judge:
    return OneByOne(RuleJudge(prepared.config.judge.rule))


def label_judge(prepared: Prepared, grm: Grm | None, meta: MetaScorer | None = None) -> Judge:
    return OneByOne(LabelJudge(rule_of(prepared.config.judge)))


def mixed_judge(prepared: Prepared, grm: Grm | None, meta: MetaScorer | None = None) -> Judge:
    mix = prepared.config.judge.mix
    return MixedJudge({name: (JUDGES[name](prepared, grm, meta), weight) for name, weight in mix.items()})


def users_judge(prepared: Prepared, *_: object) -> Judge:
    return own_judge(prepared.config.judge)


async def ray_cluster(config: RunConfig, placement: Placement) -> Cluster:
    from scheduler.ray_cluster import RayCluster

    with section(""):  # what only the machines of a cluster that is joined can tell is refused as anything else is
        return await RayCluster.start(config.cluster, placement)


async def inprocess_cluster(config: RunConfig, placement: Placement) -> Cluster:
    return InProcessCluster(placement)


class MakeJudge(Protocol):
    """`grm`: what a generative judge asks; `meta`: what guides its vote. None where there is none."""

    def __call__(self, prepared: Prepared, grm: Grm | None, meta: MetaScorer | None = None, /) -> Judge: ...


JUDGES: dict[str, MakeJudge] = {
    "generative": generative_judge,
    "rule": rule_judge,
    "mixed": mixed_judge,
    "label": label_judge,
    "own": users_judge,
}
ENVS: dict[str, Callable[[Prompt], Env]] = {"single_turn": SingleTurn}
CLUSTERS: dict[str, Callable[[RunConfig, Placement], Awaitable[Cluster]]] = {
    "ray": ray_cluster,
    "inprocess": inprocess_cluster,
}


# -- starting ------------------------------------------------------------------------------------------------------


async def start(prepared: Prepared, events: EventSink, run_dir: Path) -> Running:
    """Bring up all processes at the same time. On failure what was started is ended."""
    config, placement = prepared.config, prepared.placement
    cluster = await CLUSTERS[config.cluster.kind](config, placement)
    try:
        one_machine = len(cluster.machines("learner") | cluster.machines("policy")) == 1
        transport = transport_of(config, placement, same_machine=one_machine)
        spec = learner_spec(config, prepared.policy.path, placement, transport, run_dir)
        learner, served = await (start_by_turns if placement.time_sharing_roles else start_together)(
            cluster, prepared, spec, events
        )
        grm_ranks = await start_grm_learner(cluster, prepared, run_dir)
        scorers = await start_scorers(cluster, prepared.meta, config, placement, events)
        critic = await start_critic(cluster, prepared.critic, config, placement, events)
    except BaseException:
        await cluster.shutdown()
        raise
    routers = served.routers
    policy, grm = routers["policy"], routers.get("grm")
    outside = outside_engine(config)
    clock = ActiveClock()
    judge = JUDGES[config.judge.kind](
        prepared, grm_of(prepared, grm, outside, events, clock), guide_of(prepared.meta, scorers)
    )
    sync = make_sync(prepared, learner, cluster, transport)
    learns_too = trainee(prepared, cluster, grm_ranks, grm)
    syncs = {"policy": sync} | ({"grm": learns_too.sync} if learns_too is not None else {})
    bring_current = served.bring_current(syncs)
    elastic = elastic_pools(prepared, served, bring_current, syncs, events)
    for pool in elastic:
        bring_current |= {role: functools.partial(pool.bring_current, role) for role in pool.slots_by_role}
        if "grm" in pool.slots_by_role:
            pool.stops("grm", clock)
    share = None
    if isinstance(learner, LearnerByTurns):
        share = time_share_of(prepared, routers, bring_current, learner, events)
        bring_current |= {role: functools.partial(share.bring_current, role) for role in placement.time_sharing_roles}
        if "grm" in placement.time_sharing_roles:
            share.stops(clock)
    health = [
        RoleHealth(role, router, served.restart[role], config.health, bring_current[role], events)
        for role, router in routers.items()
    ]
    for watch in health:
        if watch.role == "grm":
            watch.stops(clock)
    return Running(
        cluster=cluster,
        policy=policy,
        learner=learner,
        judge=judge,
        sync=sync,
        health=tuple(health),
        elastic=elastic,
        share=share,
        outside=outside,
        scorers=scorers,
        trainee=learns_too,
        critic=critic,
    )


async def start_together(
    cluster: Cluster, prepared: Prepared, spec: LearnerSpec, events: EventSink
) -> tuple[LearnerGroup, Served]:
    """Learner and engines, all at the same time."""
    ranks, served = await asyncio.gather(
        cluster.start_group("learner", functools.partial(Learner, spec)), start_routers(cluster, prepared, events)
    )
    return LearnerGroup(ranks), served


async def start_by_turns(
    cluster: Cluster, prepared: Prepared, spec: LearnerSpec, events: EventSink
) -> tuple[LearnerGroup, Served]:
    """The learner first, which then makes room for the engines."""
    learner = LearnerByTurns(await cluster.start_group("learner", functools.partial(LendingLearner, spec)))
    await learner.reside("nothing")
    return learner, await start_routers(cluster, prepared, events)


def make_sync(prepared: Prepared, learner: LearnerGroup, cluster: Cluster, transport: str) -> WeightSync:
    config = prepared.config
    log.info("weights go to the policy's engines by %s", transport)
    return WeightSync(
        learner,
        prepared.policy.renderer.render(prepared.prompts.at(0).messages)[: config.sync.probe_tokens],
        sync_config_of("policy", config),
        transport=transport,
        ranks_per_engine=tensor_parallel_of("policy", prepared.placement),
        new_address=functools.partial(cluster.free_address, "learner"),
    )


def outside_engine(config: RunConfig) -> OpenAIEngine | None:
    """The client of a judge behind an endpoint; None where the judge is here, or a rule."""
    if not config.judge_is_outside:
        return None
    options = engine_config_of("grm", config)
    assert isinstance(options, OpenAIConfig)
    limits = RateLimits(requests_per_minute=options.requests_per_minute, tokens_per_minute=options.tokens_per_minute)
    return OpenAIEngine(config.grm.path, "grm", options, limits=limits)


def grm_of(
    prepared: Prepared, here: Engine | None, outside: ChatEngine | None, events: EventSink, clock: ActiveClock
) -> Grm | None:
    """What a generative judge asks; None where no model judges. `clock` times the answers of one that is here."""
    if outside is not None:
        return GrmOutside("grm", outside, window_of("grm", prepared.config, 0), events)
    if here is None or (model := prepared.grm) is None:
        return None
    return GrmHere(model.name, here, model.renderer, model.context_tokens, clock)


def learner_spec(
    config: RunConfig, model_path: str, placement: Placement, transport: str, run_dir: Path
) -> LearnerSpec:
    return LearnerSpec(
        model_path=model_path,
        train=policy_train(config.critic, config.train),
        algorithm=config.algorithm,
        max_new_tokens=config.rollout.max_new_tokens,
        device=device_of("learner", placement),
        sync_dtype=config.policy.dtype,
        bucket_bytes=config.sync.bucket_mb << 20,
        transport=transport,
        sync_dir=str(run_dir.absolute() / "weights") if transport == "disk" else "",
        temperature=config.rollout.temperature,
        first_version=config.critic.warmup_steps if config.critic.enabled else 0,
        lora=config.policy.lora,
        adapter_dir=str(run_dir.absolute() / "adapter"),
    )


def make_parts(prepared: Prepared, running: Running, observers: Observers) -> Parts:
    """What the pipeline runs on."""
    config = prepared.config
    gate = FailureGate(
        max_failure_rate=config.judge.max_failure_rate,
        window=config.judge.failure_window,
        pause_s=config.judge.pause_s,
    )
    critic, journal = running.critic, observers.recorder
    trainer: Trainer = BatchTrainer(
        running.learner, config.train, config.algorithm, config.rollout.max_new_tokens, critic
    )
    if running.share is not None:
        trainer = TrainerByTurns(trainer, begin_turn(running.share))
    return Parts(
        prompts=prepared.prompts,
        too_long=too_long(prepared),
        play=make_play(prepared, running.policy, config.rollout.temperature),
        judge=running.judge,
        watch=JudgeFitness(gate),
        trainer=trainer,
        push_weights=make_push(running),
        journal=journal if critic is None else ValuedJournal(journal, critic.valuer),
        events=observers.timeline,
    )


def make_play(prepared: Prepared, policy: Engine, temperature: float) -> Play:
    """Playing one episode, with everything but the seat and the prompt filled in."""
    rollout, make_env = prepared.config.rollout, ENVS[prepared.config.env.kind]
    params = SamplingParams(max_new_tokens=rollout.max_new_tokens, temperature=temperature, top_p=rollout.top_p)

    async def played(seat: Seat, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        env, renderer = make_env(prompt), prepared.policy.renderer
        return await play(seat, env, policy, renderer, params, rollout.max_turns, on_first_token)

    return played


def make_evaluator(prepared: Prepared, running: Running) -> Evaluator:
    return Evaluator(
        prompts=prepared.held_out,
        play_sampled=make_play(prepared, running.policy, 1.0),
        play_greedy=make_play(prepared, running.policy, 0.0),
        judge=running.judge,
        is_right=prepared.is_right,
        seed=prepared.config.seed,
        pass_score=pass_score_of(prepared.config),
    )


def pass_score_of(config: RunConfig) -> float | None:
    """From which score on a GRM calls an answer right; None where no GRM judges, or not on such a scale."""
    judge, pass_score = config.judge, config.labels.pass_score
    on_scale = config.judged_by_model and judge.score_min < pass_score <= judge.score_max
    return judge.shown_score(pass_score) if on_scale else None


def make_push(running: Running) -> Callable[[int], Awaitable[SyncReport]]:
    """Weights of the learner to every policy engine that lives, confirmed."""
    push, share = functools.partial(push_to_living, running.sync, running.policy), running.share
    if share is None:
        return push
    return lambda version: share.push(lambda: push(version))


def too_long(prepared: Prepared) -> Callable[[Prompt], bool]:
    """Whether a prompt leaves no room for an answer in the policy's window."""
    policy, max_new_tokens = prepared.policy, prepared.config.rollout.max_new_tokens

    def check(prompt: Prompt) -> bool:
        return len(policy.renderer.render(prompt.messages)) + max_new_tokens > policy.context_tokens

    return check
