"""Started components -> the evaluations on held-out prompts."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

from grmpipe.config.run_config import RunConfig
from grmpipe.config.task_settings import EvaluateConfig
from grmpipe.envs.episode_slots import in_own_slot
from grmpipe.evaluation.held_out import Evaluator
from grmpipe.evaluation.sampled_answers import AnswerSampling
from grmpipe.judge.composition.composed_judge import get_members, get_skill, with_own_bounds
from grmpipe.observe.progress import Progress
from grmpipe.run.build.compose_pipeline import compose_health
from grmpipe.run.build.make_play import make_play
from grmpipe.run.build.start import Running
from grmpipe.run.prepare import Prepared
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.types import Judge, Prompt


def make_evaluator(prepared: Prepared, running: Running, progress: Progress) -> Evaluator:
    """The evaluations of a run that trains."""
    config, judge = prepared.config, running.judge
    sampling = read_sampling(config.evaluate, default=1)
    return replace(
        evaluator_on(take_sources_in_turn(prepared.held_out), prepared, running, with_own_bounds(judge), sampling),
        first=first_of_all_answers(config, judge, prepared.held_out),
        pass_reward=compute_pass_reward(config),
        by_model=config.judging.by_model,
        compares=config.judging.compares,
        skill=get_skill(judge),
        progress=progress,
    )


def take_sources_in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, one of each source after the other: the first ones, which are the anchors, are of all sources."""
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    return [prompt for turn in itertools.zip_longest(*by_source.values()) for prompt in turn if prompt is not None]


def evaluator_on(
    prompts: Sequence[Prompt], prepared: Prepared, running: Running, judge: Judge, sampling: AnswerSampling
) -> Evaluator:
    """The evaluation of the policy on prompts."""
    config, clock, envs = prepared.config, ActiveClock(), running.envs
    running.maintenance.stops(clock)
    play = functools.partial(make_play, prepared, running.policy.router, envs)
    return Evaluator(
        prompts=prompts,
        play_sampled=in_own_slot(play(config.evaluate.temperature), envs.slots),
        play_greedy=in_own_slot(play(0.0), envs.slots),
        judge=judge,
        is_right=prepared.is_right,
        seed=config.seed,
        counting=sampling,
        greedy=config.evaluate.greedy,
        deadline_s=config.rollout.group_deadline_s,
        clock=clock,
        make_health=functools.partial(compose_health, config),
    )


def read_sampling(evaluate: EvaluateConfig, default: int) -> AnswerSampling:
    """How many answers to a prompt are sampled, and each k of pass@k. default: answers, if neither is set."""
    num_samples = evaluate.samples(default)
    return AnswerSampling(num_samples=num_samples, pass_k=evaluate.pass_ks(num_samples))


def first_of_all_answers(config: RunConfig, judge: Judge, prompts: Sequence[Prompt]) -> str | None:
    """The first of several judges, if it judges every answer to the prompts. None if it compares, or if other verdicts
    decide what it sees: its scores would then be of a part of the answers, which changes as the policy learns.
    """
    name, sources = config.judging.main, {prompt.source for prompt in prompts}
    sees_all = all(name in config.rewards.always_asked(source) for source in sources)
    compares = name in config.judging.generative and config.main_judge.protocol_kind.compares
    return name if name in get_members(judge) and sees_all and not compares else None


def compute_pass_reward(config: RunConfig) -> float | None:
    """The lowest reward with which a judge passes an answer, whatever its scale. None if `data.labels.pass_score`
    isn't on the first judge's, or that has none.
    """
    if not config.main_judge.has_scale:
        return None
    scale, pass_score = config.main_judge.scale, config.data.labels.pass_score
    return scale.to_reward(pass_score) if scale.low < pass_score <= scale.high else None
