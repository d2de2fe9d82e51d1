"""Evaluation on held-out problems: what the policy gets right by a rule that training never sees, and the judge's
verdicts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from grmpipe.envs.attempts import EpisodeFailed
from grmpipe.envs.play import Play, RolloutAborted, RolloutRequest
from grmpipe.judge.composition.combine import reaches
from grmpipe.judge.composition.skill import MeasuredSkill
from grmpipe.judge.pointwise_adapter import judge_alone
from grmpipe.judge.rule import Rule
from grmpipe.pipeline.env_counts import EnvCounts
from grmpipe.types import Judge, JudgeReport, Metrics, Prompt, Rollout, Verdict
from models.seeds import derive_seed
from models.types import EngineRefused, ignore_first_token
from scheduler.clock import ActiveClock

log = logging.getLogger(__name__)

T = TypeVar("T")

EVAL_METRICS = ("true_accuracy", "true_accuracy_greedy", "grm_score", "reward", "grm_accuracy", "response_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRollout:
    """A held-out problem and its judged answer. right: how right it is by the rule, from 0 to 1; None without a
    reference that the rule can use.
    """

    prompt: Prompt
    rollout: Rollout
    report: JudgeReport
    right: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEvaluation:
    """The metrics by their names in summary.json, and the sampled rollouts behind them."""

    metrics: Metrics
    rollouts: tuple[JudgedRollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Plays held-out prompts sampled as in training (T = 1) and greedily; the sampled ones are judged.

    first:      of several judges, the one whose verdicts are the GRM's: it judges every answer. None: the verdicts that
                make the reward are, whose scores are on the first judge's scale.
    pass_reward: lowest reward with which a judge passes an answer; None if there is none.
    by_model:   whether a model judges, so that there is an accuracy of the GRM.
    deadline_s: results that come later than this after the last answer, on `clock`, are left out.
    skill:      gets the accuracy of each of several judges.
    episodes:   gets what was played.
    """

    prompts: Sequence[Prompt]
    play_sampled: Play
    play_greedy: Play
    judge: Judge
    is_right: Rule
    seed: int
    first: str | None = None
    pass_reward: float | None = None
    by_model: bool = True
    deadline_s: float = math.inf
    clock: ActiveClock | None = None
    skill: MeasuredSkill = field(default_factory=MeasuredSkill)
    episodes: EnvCounts = field(default_factory=EnvCounts)

    async def evaluate(self, name: str, limit: int | None = None) -> HeldOutEvaluation:
        """Evaluate on the first `limit` prompts (all by default). `name` separates the requests of evaluations."""
        prompts = self.prompts[:limit]
        sampled = [asyncio.create_task(self._judged(f"{name}-{i}", prompt)) for i, prompt in enumerate(prompts)]
        greedy = [
            asyncio.create_task(self._played(f"{name}-greedy-{i}", prompt, self.play_greedy))
            for i, prompt in enumerate(prompts)
        ]
        await self._until_ended([*sampled, *greedy])
        judged = tuple(one for task in sampled if (one := _result(task)) is not None)
        greedy_right = [
            right
            for prompt, task in zip(prompts, greedy, strict=True)
            if (rollout := _result(task)) is not None and (right := self._right(prompt, rollout)) is not None
        ]
        by_judge = {} if self.pass_reward is None else accuracy_by_judge(judged, self.pass_reward)
        self.skill.measured(by_judge)
        metrics = summarise(judged, greedy_right, self.first, self.pass_reward if self.by_model else None)
        metrics |= {f"{name}_accuracy": accuracy for name, accuracy in by_judge.items() if name != self.first}
        return HeldOutEvaluation(metrics=metrics, rollouts=judged)

    async def _until_ended(
        self, tasks: Sequence[asyncio.Task[JudgedRollout | None] | asyncio.Task[Rollout | None]]
    ) -> None:
        """Return once all tasks have ended, or none has for `deadline_s`; late ones are cancelled."""
        clock = self.clock or ActiveClock()
        last_s = clock.now()

        def note(_: object) -> None:
            nonlocal last_s
            last_s = clock.now()

        async def stalled() -> None:
            while (deadline := last_s + self.deadline_s) > clock.now():
                await (clock.sleep_until(deadline) if deadline < math.inf else asyncio.Event().wait())

        for task in tasks:
            task.add_done_callback(note)

        async def ended() -> None:
            await asyncio.gather(*tasks)

        all_ended, stall = asyncio.create_task(ended()), asyncio.create_task(stalled())
        try:
            await asyncio.wait([all_ended, stall], return_when=asyncio.FIRST_COMPLETED)
            if all_ended.done():
                all_ended.result()
            else:
                late = sum(not task.done() for task in tasks)
                log.warning("%d held-out answers are left out: no answer came for %g s", late, self.deadline_s)
        finally:
            for waiting in (*tasks, stall):
                waiting.cancel()
            await asyncio.gather(*tasks, stall, all_ended, return_exceptions=True)

    async def _played(self, group_id: str, prompt: Prompt, play: Play) -> Rollout | None:
        request = RolloutRequest(group_id=group_id, sibling=0, seed=derive_seed(self.seed, group_id), priority=1)
        try:
            rollout = await play(request, prompt, ignore_first_token)
        except (EngineRefused, RolloutAborted, EpisodeFailed) as error:
            log.warning("held-out prompt %s could not be played: %s", prompt.prompt_id, error)
            if isinstance(error, EpisodeFailed):
                self.episodes.episode_failed(error.failures)
            return None
        self.episodes.rollout(rollout)
        return rollout

    async def _judged(self, group_id: str, prompt: Prompt) -> JudgedRollout | None:
        rollout = await self._played(group_id, prompt, self.play_sampled)
        if rollout is None:
            return None
        report = await judge_alone(self.judge, prompt, rollout)
        return JudgedRollout(prompt=prompt, rollout=rollout, report=report, right=self._right(prompt, rollout))

    def _right(self, prompt: Prompt, rollout: Rollout) -> float | None:
        """How right an answer is; None without a reference that the rule can use."""
        if prompt.reference is None:
            return None
        try:
            return self.is_right(rollout.answer, prompt.reference)
        except ValueError as error:
            log.warning("held-out prompt %s has no known truth: %s", prompt.prompt_id, error)
            return None


def _result(task: asyncio.Task[T]) -> T | None:
    return None if task.cancelled() else task.result()


def summarise(
    judged: Sequence[JudgedRollout],
    greedy_right: Sequence[float],
    first: str | None = None,
    pass_reward: float | None = None,
) -> Metrics:
    """The measurable metrics only: a failed verdict enters no mean, an unknown truth no accuracy."""
    grm, of_all = verdicts_by(judged, first), verdicts_by(judged, None)
    right = [one.right for one in judged if one.right is not None]
    metrics: Metrics = {}
    if right:
        metrics["true_accuracy"] = statistics.fmean(right)
    if greedy_right:
        metrics["true_accuracy_greedy"] = statistics.fmean(greedy_right)
    if grm:
        metrics["grm_score"] = statistics.fmean(verdict.score for _, verdict in grm)
    if of_all:
        metrics["reward"] = statistics.fmean(verdict.outcome for _, verdict in of_all)
    if pass_reward is not None and (sides := agreements(grm, pass_reward)):
        metrics["grm_accuracy"] = statistics.fmean(sides)
    if judged:
        metrics["response_tokens"] = statistics.fmean(one.rollout.num_sampled_tokens for one in judged)
    return metrics


RightAndVerdict = tuple[float | None, Verdict]  # how right an answer is, if that is known, and a verdict on it


def verdicts_by(judged: Sequence[JudgedRollout], judge: str | None) -> list[RightAndVerdict]:
    """The verdicts of one of several judges, on the answers about which it was asked; of None: those that make the
    reward.
    """
    reports = [(one.right, one.report if judge is None else one.report.by_judge.get(judge)) for one in judged]
    return [
        (right, report.verdict)
        for right, report in reports
        if report is not None and isinstance(report.verdict, Verdict)
    ]


def agreements(verdicts: Sequence[RightAndVerdict], pass_reward: float) -> list[bool]:
    """Whether a judge passes and fails the same answers as the rule, for the answers with known truth."""
    known = [(right, verdict.outcome) for right, verdict in verdicts if right is not None]
    return [reaches(reward, pass_reward) == reaches(right, pass_reward) for right, reward in known]


def accuracy_by_judge(judged: Sequence[JudgedRollout], pass_reward: float) -> dict[str, float]:
    """The share of agreements of each of several judges; empty with a single one."""
    names = dict.fromkeys(name for one in judged for name in one.report.by_judge)
    sides = {name: agreements(verdicts_by(judged, name), pass_reward) for name in names}
    return {name: statistics.fmean(some) for name, some in sides.items() if some}
