"""RunConfig -> checked parts -> running parts. The only room that knows every other; it holds no loop of its own."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from grmpipe.config import ConfigError, RunConfig
from grmpipe.data.prompts import disjoint, load_prompts
from grmpipe.data.stream import PromptStream
from grmpipe.envs.single_turn import SingleTurn
from grmpipe.evaluate import Evaluator
from grmpipe.flow import Parts, Play
from grmpipe.judge.fitness import JudgeFitness
from grmpipe.judge.generative import GenerativeJudge
from grmpipe.judge.mixed import MixedJudge
from grmpipe.judge.prompt import JudgePrompt
from grmpipe.judge.rule import RULES, Rule, RuleJudge
from grmpipe.judge.watch import FailureGate
from grmpipe.observers import Observers
from grmpipe.rollout.play import Seat, play
from grmpipe.train.batch import BatchTrainer
from grmpipe.train.learner import Learner, LearnerSpec
from grmpipe.train.learner_group import LearnerGroup
from grmpipe.types import Env, Judge, Prompt, Rollout
from models.engines.embedded import EmbeddedEngine
from models.renderer import Renderer
from models.settings import ModelConfig
from models.tiny.resolve import resolve_model
from models.types import Engine, SamplingParams
from scheduler.actors import Cluster, InProcessCluster
from scheduler.events import EventSink
from scheduler.placement import NodeCapacity, Placement, check_capacity, place
from scheduler.router import Router
from scheduler.weight_sync import SyncReport, push

log = logging.getLogger(__name__)
T = TypeVar("T")

Progress = Callable[[str, float], None]  # (what, share done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A role's model, found and checked."""

    name: str  # the role's: policy, grm
    path: str
    renderer: Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All that can be known, and refused, before anything starts."""

    config: RunConfig
    policy: Model
    grm: Model | None
    prompts: PromptStream
    held_out: tuple[Prompt, ...]
    placement: Placement

    @property
    def is_right(self) -> Rule:
        """The rule that training never sees (unless the user makes it the judge)."""
        return RULES[self.config.judge.rule]


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
    options = config.policy if model.name == "policy" else config.grm
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
    renderer, config = prepared.grm.renderer, prepared.config
    return GenerativeJudge(grm, renderer, config.judge, prepared.grm.name, config.seed, renderer.context_tokens)


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


# -- before anything starts ----------------------------------------------------------------------------------------


def prepare(config: RunConfig, progress: Progress) -> Prepared:
    """Find models, read data, seat roles. Raises ConfigError naming the key and what to type."""
    placement = section("", lambda: place(config.placement, config.roles))
    if config.cluster.kind == "ray" and config.cluster.address is None:
        section("", lambda: check_capacity(placement, [this_machine()]))
    prompts = section("data.", lambda: load_prompts(config.data.path, num_tiny_prompts=config.data.num_prompts))
    held_out = section("data.", lambda: load_held_out(config))
    train_prompts, num_shared = disjoint(prompts, held_out)
    if num_shared:
        log.warning("%d prompts are in the held-out set as well: they are not trained", num_shared)
    if not train_prompts:
        raise ConfigError(f"data.path: every prompt of {config.data.path} is in the held-out set as well")
    if config.judge.kind != "rule":
        section("judge.", lambda: JudgePrompt.load(config.judge.template))
    return Prepared(
        config=config,
        policy=find_model("policy", config.policy, progress),
        grm=find_model("grm", config.grm, progress) if "grm" in config.roles else None,
        prompts=PromptStream(
            train_prompts, seed=config.seed, shuffle=config.data.shuffle, max_epochs=config.data.max_epochs
        ),
        held_out=held_out,
        placement=placement,
    )


def find_model(name: str, options: ModelConfig, progress: Progress) -> Model:
    """Make a tiny model if need be, and check that the tokenizer can chat."""
    path = section(f"{name}.", lambda: resolve_model(options.path, progress))
    return Model(name=name, path=path, renderer=section(f"{name}.", lambda: Renderer.load(path, options.chat_template)))


def load_held_out(config: RunConfig) -> tuple[Prompt, ...]:
    path = config.data.eval_path
    if path == "auto":
        path = "tiny://held_out" if config.data.path == "tiny://train" else None
    if path is None:
        return ()
    count = config.data.num_eval_prompts
    prompts = load_prompts(path, num_tiny_prompts=count)[:count]
    for prompt in prompts:
        if prompt.reference is not None:
            RULES[config.judge.rule]("", prompt.reference)  # raises for a reference that the rule can't read
    return prompts


def section(path: str, check: Callable[[], T]) -> T:
    """Run a check; its ValueError gets the section's key in front, unless it names its section itself."""
    try:
        return check()
    except ConfigError:
        raise
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(path) else f"{path}{text}") from error


def this_machine() -> NodeCapacity:
    import torch

    return NodeCapacity(name="this machine", cpus=os.cpu_count() or 1, gpus=torch.cuda.device_count())


def device_of(role: str, placement: Placement) -> str:
    pool = placement.seats[role][0].pool
    return "cuda" if placement.pools[pool].resource == "gpu" else "cpu"


# -- starting ------------------------------------------------------------------------------------------------------


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
    options = prepared.config.policy if model.name == "policy" else prepared.config.grm
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
    renderer, max_new_tokens = prepared.policy.renderer, prepared.config.rollout.max_new_tokens

    def check(prompt: Prompt) -> bool:
        return len(renderer.render(prompt.messages)) + max_new_tokens > renderer.context_tokens

    return check


def names_of_models(prepared: Prepared) -> Mapping[str, str]:
    """Role -> path, for people."""
    models = [prepared.policy] + ([prepared.grm] if prepared.grm else [])
    return {model.name: str(Path(model.path)) for model in models}
