"""Started components -> what the pipeline and the evaluations run on. It starts nothing, and holds no loop of its
own."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from grmpipe.config.run_config import RunConfig
from grmpipe.envs.env_factory import env_factory
from grmpipe.envs.play import Play, RolloutRequest, play
from grmpipe.evaluation.held_out import Evaluator
from grmpipe.judge.monitor.circuit_breaker import CircuitBreaker, JudgeFitness
from grmpipe.pipeline.interfaces import PipelineComponents, Trainer
from grmpipe.run.observers import Observers
from grmpipe.run.start import RunComponents
from grmpipe.train.critic.valued_journal import ValuedJournal
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.train.learner.time_shared_learner import TimeSharedTrainer, begin_learner_phase
from grmpipe.types import Prompt, Rollout
from grmpipe.validate.prepare import Prepared
from models.types import Engine, SamplingParams
from scheduler.clock import ActiveClock
from scheduler.slots.health import push_to_living
from scheduler.weights.weight_sync import SyncReport


def make_parts(prepared: Prepared, running: RunComponents, observers: Observers) -> PipelineComponents:
    """What the pipeline runs on."""
    config = prepared.config
    breaker = CircuitBreaker(
        max_failure_rate=config.judge.max_failure_rate,
        window=config.judge.failure_window,
        pause_s=config.judge.pause_s,
    )
    critic, journal = running.critic, observers.recorder
    trainer: Trainer = BatchTrainer(
        running.learner, config.train, config.algorithm, config.rollout.max_new_tokens, critic, config.seed
    )
    if running.share is not None:
        trainer = TimeSharedTrainer(trainer, begin_learner_phase(running.share))
    return PipelineComponents(
        prompts=prepared.prompts,
        too_long=too_long(prepared),
        play=make_play(prepared, running.policy, config.rollout.temperature),
        judge=running.judge,
        judge_guard=JudgeFitness(breaker),
        trainer=trainer,
        push_weights=make_push(running),
        journal=journal if critic is None else ValuedJournal(journal, critic.value_cache),
        events=observers.timeline,
    )


def make_play(prepared: Prepared, policy: Engine, temperature: float) -> Play:
    """Playing one episode, with everything but the seat and the prompt filled in."""
    rollout, make_env = prepared.config.rollout, env_factory(prepared.config.env)
    params = SamplingParams(max_new_tokens=rollout.max_new_tokens, temperature=temperature)

    async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        env, renderer = make_env(prompt), prepared.policy.renderer
        return await play(request, env, policy, renderer, params, rollout.max_turns, on_first_token)

    return played


def make_evaluator(prepared: Prepared, running: RunComponents) -> Evaluator:
    clock = ActiveClock()
    running.stops(clock)
    return Evaluator(
        prompts=prepared.held_out,
        play_sampled=make_play(prepared, running.policy, 1.0),
        play_greedy=make_play(prepared, running.policy, 0.0),
        judge=running.judge,
        is_right=prepared.is_right,
        seed=prepared.config.seed,
        pass_score=pass_score_of(prepared.config),
        deadline_s=prepared.config.rollout.group_deadline_s,
        clock=clock,
        scale=prepared.config.judge.scale if prepared.config.judge.kind == "mixed" else None,
    )


def pass_score_of(config: RunConfig) -> float | None:
    """From which score on a GRM calls an answer right; None where no GRM judges, or not on such a scale."""
    judge, pass_score = config.judge, config.labels.pass_score
    on_scale = config.judged_by_model and judge.score_min < pass_score <= judge.score_max
    return judge.shown_score(pass_score) if on_scale else None


def make_push(running: RunComponents) -> Callable[[int], Awaitable[SyncReport]]:
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
