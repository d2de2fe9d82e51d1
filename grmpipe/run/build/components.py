"""Started components -> the components of the pipeline and the evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grmpipe.config.evaluation import EvaluateConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.envs.attempts import with_attempts
from grmpipe.envs.play import EpisodeLimits, Play, RolloutRequest, play
from grmpipe.envs.reasoning_engine import ReasoningEngine
from grmpipe.envs.seats import seated
from grmpipe.evaluation.held_out import Evaluator
from grmpipe.evaluation.sampled_answers import Counting
from grmpipe.judge.composition.composed_judge import members_of, skill_of, with_own_bounds
from grmpipe.pipeline.interfaces import PipelineComponents
from grmpipe.run.build.composition import Learners, compose
from grmpipe.run.build.start import RunComponents
from grmpipe.run.build.start_envs import Envs
from grmpipe.run.features.cotrain.cotrainings import CoTrainings
from grmpipe.run.observers import Observers
from grmpipe.types import Judge, Prompt, Rollout
from grmpipe.validate.prepare import Prepared
from grmpipe.workflows.recorder import Recorder
from models.types import KeepsTrajectories, SamplingParams
from scheduler.clock import ActiveClock
from scheduler.routing.router import Router


def make_parts(
    prepared: Prepared, running: RunComponents, observers: Observers, cotrainings: CoTrainings
) -> PipelineComponents:
    """The components of the policy's pipeline."""
    learners = Learners(
        policy=running.learner,
        sync=running.sync,
        engines=running.policy,
        critic=running.critic,
        share=running.maintenance.share,
        cotrainings=cotrainings,
    )
    return compose(
        prepared.config,
        learners,
        prompts=prepared.prompts,
        too_long=too_long(prepared),
        play=make_play(prepared, running.policy, running.envs, prepared.config.rollout.temperature),
        seats=running.envs.seats,
        judge=running.judge,
        journal=observers.recorder,
        events=observers.timeline,
    )


def make_play(prepared: Prepared, engines: Router, envs: Envs, temperature: float) -> Play:
    """An episode without its request and prompt. engines: of the policy."""
    rollout, env = prepared.config.rollout, prepared.config.env
    sampler, renderer = ReasoningEngine(engines, prepared.policy.renderer), prepared.policy.renderer
    params = SamplingParams(max_new_tokens=rollout.max_new_tokens, temperature=temperature, stop=tuple(rollout.stop))
    limits = EpisodeLimits(
        max_turns=rollout.max_turns,
        context_tokens=prepared.policy.context_tokens,
        episode_s=env.episode_s,
        timed=not env.env_kind.is_single,
    )

    if (workflow := envs.workflow) is not None:
        recorder = Recorder(sampler, renderer, params, limits, envs.events)
        asked = freeing(workflow.play(recorder), engines)
        return with_attempts(asked, attempts=env.attempts, retry_s=env.retry_s)
    make = envs.make
    assert make is not None, "an episode without a workflow has an environment"

    async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        return await play(request, prompt, make(), sampler, renderer, params, limits, on_first_token)

    if env.env_kind.is_single:
        return played
    return with_attempts(freeing(played, engines), attempts=env.attempts, retry_s=env.retry_s)


def freeing(play: Play, engines: KeepsTrajectories) -> Play:
    """A play at whose end the engines free what they keep of the episode for further turns."""

    async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        try:
            return await play(request, prompt, on_first_token)
        finally:
            engines.end_trajectory(request.trajectory_id)

    return played


def make_evaluator(prepared: Prepared, running: RunComponents) -> Evaluator:
    clock, evaluate, envs = ActiveClock(), prepared.config.evaluate, running.envs
    running.maintenance.stops(clock)
    return Evaluator(
        prompts=prepared.held_out,
        play_sampled=seated(make_play(prepared, running.policy, envs, evaluate.temperature), envs.seats),
        play_greedy=seated(make_play(prepared, running.policy, envs, 0.0), envs.seats),
        judge=with_own_bounds(running.judge),
        is_right=prepared.is_right,
        seed=seed_of(prepared.config),
        counting=counting_of(evaluate, default=1),
        greedy=evaluate.greedy,
        first=first_of_all_answers(prepared.config, running.judge, prepared.held_out),
        pass_reward=pass_reward_of(prepared.config),
        by_model=prepared.config.judging.by_model,
        compares=prepared.config.judging.compares,
        skill=skill_of(running.judge),
        deadline_s=prepared.config.rollout.group_deadline_s,
        clock=clock,
    )


def seed_of(config: RunConfig) -> int:
    """The seed of sampled answers to held-out prompts."""
    return config.seed if config.evaluate.seed is None else config.evaluate.seed


def counting_of(evaluate: EvaluateConfig, default: int) -> Counting:
    """How many answers to a prompt are sampled, and each k of pass@k. default: answers, if neither is set."""
    num_samples = evaluate.samples(default)
    return Counting(num_samples=num_samples, pass_k=evaluate.pass_ks(num_samples))


def first_of_all_answers(config: RunConfig, judge: Judge, prompts: Sequence[Prompt]) -> str | None:
    """The first of several judges, if it judges every answer to the prompts. None if it compares, or if other verdicts
    decide what it sees: its scores would then be of a part of the answers, which changes as the policy learns.
    """
    first, sources = config.judging.first, {prompt.source for prompt in prompts}
    sees_all = all(first in config.reward_tree.always_asked(source) for source in sources)
    compares = first in config.judging.generative and config.first_judge.protocol_kind.compares
    return first if first in members_of(judge) and sees_all and not compares else None


def pass_reward_of(config: RunConfig) -> float | None:
    """The lowest reward with which a judge passes an answer, whatever its scale. None if `labels.pass_score` isn't on
    the first judge's.
    """
    scale, pass_score = config.first_judge.scale, config.labels.pass_score
    return scale.reward_of(pass_score) if scale.low < pass_score <= scale.high else None


def too_long(prepared: Prepared) -> Callable[[Prompt], bool]:
    """A function: whether a prompt leaves no room for an answer in the policy's context window."""
    policy, max_new_tokens = prepared.policy, prepared.config.rollout.max_new_tokens

    def check(prompt: Prompt) -> bool:
        return len(policy.renderer.render(prompt.messages)) + max_new_tokens > policy.context_tokens

    return check
