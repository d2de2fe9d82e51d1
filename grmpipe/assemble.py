"""RunConfig -> checked parts -> running parts. The only room that knows every other; it holds no loop of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from grmpipe.config import RunConfig
from grmpipe.envs.single_turn import SingleTurn
from grmpipe.evaluate import Evaluator
from grmpipe.flow import Parts
from grmpipe.judge.fitness import JudgeFitness
from grmpipe.judge.generative import GenerativeJudge
from grmpipe.judge.mixed import MixedJudge
from grmpipe.judge.rule import RuleJudge
from grmpipe.judge.watch import FailureGate
from grmpipe.observers import Observers
from grmpipe.prepare import Model, Prepared, options_of
from grmpipe.rollout.play import Play, Seat, play
from grmpipe.train.batch import BatchTrainer
from grmpipe.train.learner import Learner, LearnerSpec
from grmpipe.train.learner_group import LearnerGroup
from grmpipe.types import Env, Judge, Prompt, Rollout
from models.engines.embedded import EmbeddedEngine
from models.types import Engine, SamplingParams
from scheduler.actors import Cluster, InProcessCluster
from scheduler.events import EventSink
from scheduler.placement import Placement
from scheduler.router import Router
from scheduler.weight_sync import SyncReport, push


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The started parts."""

    cluster: Cluster
    policy: Router
    learner: LearnerGroup
    judge: Judge

    async def close(self) -> None:
        await self.cluster.shutdown()


# -- tables: a new kind is a file and a row ------------------------------------------------------------------------


def embedded_engine(model: Model, config: RunConfig, placement: Placement) -> Callable[[], Engine]:
    options = options_of(model.name, config)
    return functools.partial(
        EmbeddedEngine,
        model.path,
        model.name,
        config.engine.embedded,
        options.dtype,
        device_of(model.name, placement),
        chat_template=options.chat_template,
    )


def generative_judge(prepared: Prepared, grm: Engine | None) -> Judge:
    assert grm is not None
    assert prepared.grm is not None
    model, config = prepared.grm, prepared.config
    return GenerativeJudge(grm, model.renderer, config.judge, model.name, config.seed, model.context_tokens)


def rule_judge(prepared: Prepared, grm: Engine | None) -> Judge:
    return RuleJudge(prepared.config.judge.rule)


def mixed_judge(prepared: Prepared, grm: Engine | None) -> Judge:
    mix = prepared.config.judge.mix
    return MixedJudge({name: (JUDGES[name](prepared, grm), weight) for name, weight in mix.items()})


async def ray_cluster(config: RunConfig, placement: Placement) -> Cluster:
    from scheduler.ray_cluster import RayCluster

    return await RayCluster.start(config.cluster, placement)


async def inprocess_cluster(config: RunConfig, placement: Placement) -> Cluster:
    return InProcessCluster(placement)


ENGINES = {"embedded": embedded_engine}
JUDGES: dict[str, Callable[[Prepared, Engine | None], Judge]] = {
    "generative": generative_judge,
    "rule": rule_judge,
    "mixed": mixed_judge,
}
ENVS: dict[str, Callable[[Prompt], Env]] = {"single_turn": SingleTurn}
CLUSTERS: dict[str, Callable[[RunConfig, Placement], Awaitable[Cluster]]] = {
    "ray": ray_cluster,
    "inprocess": inprocess_cluster,
}


# -- starting ------------------------------------------------------------------------------------------------------


def device_of(role: str, placement: Placement) -> str:
    pool = placement.seats[role][0].pool
    return "cuda" if placement.pools[pool].resource == "gpu" else "cpu"


async def start(prepared: Prepared, events: EventSink) -> Running:
    """Bring up all processes at the same time. On failure what was started is ended."""
    config, placement = prepared.config, prepared.placement
    cluster = await CLUSTERS[config.cluster.kind](config, placement)
    try:
        ranks, policy, grm = await asyncio.gather(
            cluster.start_group("learner", functools.partial(Learner, learner_spec(prepared))),
            start_engines(cluster, prepared.policy, prepared, events),
            start_engines(cluster, prepared.grm, prepared, events) if prepared.grm else no_engines(),
        )
    except BaseException:
        await cluster.shutdown()
        raise
    assert policy is not None
    judge = JUDGES[config.judge.kind](prepared, grm)
    return Running(cluster=cluster, policy=policy, learner=LearnerGroup(ranks), judge=judge)


async def start_engines(cluster: Cluster, model: Model, prepared: Prepared, events: EventSink) -> Router:
    options = options_of(model.name, prepared.config)
    make_engine = ENGINES[options.engine](model, prepared.config, prepared.placement)
    return Router(model.name, await cluster.start_engines(model.name, make_engine), events)


async def no_engines() -> None:
    return None


def learner_spec(prepared: Prepared) -> LearnerSpec:
    config = prepared.config
    return LearnerSpec(
        model_path=prepared.policy.path,
        train=config.train,
        algorithm=config.algorithm,
        max_new_tokens=config.rollout.max_new_tokens,
        device=device_of("learner", prepared.placement),
        sync_dtype=config.policy.dtype,
        temperature=config.rollout.temperature,
    )


def make_parts(prepared: Prepared, running: Running, observers: Observers) -> Parts:
    """What the pipeline runs on."""
    config = prepared.config
    gate = FailureGate(
        max_failure_rate=config.judge.max_failure_rate,
        window=config.judge.failure_window,
        pause_s=config.judge.pause_s,
    )
    return Parts(
        prompts=prepared.prompts,
        too_long=too_long(prepared),
        play=make_play(prepared, running.policy, config.rollout.temperature),
        judge=running.judge,
        watch=JudgeFitness(gate),
        trainer=BatchTrainer(running.learner, config.train, config.algorithm),
        push_weights=make_push(prepared, running),
        journal=observers.recorder,
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
    )


def make_push(prepared: Prepared, running: Running) -> Callable[[int], Awaitable[SyncReport]]:
    """Weights of the learner to every policy engine, confirmed."""
    probe_ids = prepared.policy.renderer.render(prepared.prompts.at(0).messages)[: prepared.config.sync.probe_tokens]

    async def push_weights(version: int) -> SyncReport:
        return await push(running.learner, running.policy.alive, version, probe_ids, prepared.config.sync)

    return push_weights


def too_long(prepared: Prepared) -> Callable[[Prompt], bool]:
    """Whether a prompt leaves no room for an answer in the policy's window."""
    policy, max_new_tokens = prepared.policy, prepared.config.rollout.max_new_tokens

    def check(prompt: Prompt) -> bool:
        return len(policy.renderer.render(prompt.messages)) + max_new_tokens > policy.context_tokens

    return check
