"""Started components -> the evaluations on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from grmpipe.config.evaluation import EvaluateConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.envs.episode_slots import in_own_slot
from grmpipe.evaluation.held_out import Evaluator
from grmpipe.evaluation.sampled_answers import AnswerSampling
from grmpipe.judge.composition.composed_judge import members_of, skill_of, with_own_bounds
from grmpipe.run.build.make_play import make_play
from grmpipe.run.build.start import RunComponents
from grmpipe.types import Judge, Prompt
from grmpipe.validate.prepare import Prepared
from scheduler.clock import ActiveClock


def make_evaluator(prepared: Prepared, running: RunComponents) -> Evaluator:
    clock, evaluate, envs = ActiveClock(), prepared.config.evaluate, running.envs
    running.maintenance.stops(clock)
    return Evaluator(
        prompts=prepared.held_out,
        play_sampled=in_own_slot(make_play(prepared, running.policy, envs, evaluate.temperature), envs.slots),
        play_greedy=in_own_slot(make_play(prepared, running.policy, envs, 0.0), envs.slots),
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


def counting_of(evaluate: EvaluateConfig, default: int) -> AnswerSampling:
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
    return name if name in members_of(judge) and sees_all and not compares else None


def pass_reward_of(config: RunConfig) -> float | None:
    """The lowest reward with which a judge passes an answer, whatever its scale. None if `data.labels.pass_score`
    isn't on the first judge's, or that has none.
    """
    if not config.main_judge.has_scale:
        return None
    scale, pass_score = config.main_judge.scale, config.data.labels.pass_score
    return scale.reward_of(pass_score) if scale.low < pass_score <= scale.high else None
