"""Evaluation on held-out prompts: what the policy gets right by a rule that training never sees, and the judge's
verdicts.
"""

import asyncio
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from grmpipe.envs.play import Play, RolloutAborted, RolloutRequest
from grmpipe.envs.retry_episode import EpisodeFailed
from grmpipe.evaluation.intervals import Estimate
from grmpipe.evaluation.sampled_answers import AnswerSampling, figures, with_ends
from grmpipe.judge.composition.combine_verdicts import MeasuredSkill, reaches
from grmpipe.judge.grm import set_purpose
from grmpipe.judge.judge_in_time import LATE
from grmpipe.judge.kinds.rule import Rule
from grmpipe.judge.monitor.reward_hacking import REWARD, AnchorReading
from grmpipe.judge.pointwise_adapter import judge_alone, judge_group
from grmpipe.judge.verdict import get_reward
from grmpipe.models.seeds import derive_seed
from grmpipe.models.types import EngineRefused, ignore_first_token
from grmpipe.observe.progress import Progress, counts_text, join_shown, left_at_pace, left_text, speed_text
from grmpipe.pipeline.counters import EnvCounts
from grmpipe.pipeline.health import OutageBreaker, ServiceHealth
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.types import Judge, JudgeReport, Metrics, Prompt, Rollout, Verdict

log = logging.getLogger(__name__)

T = TypeVar("T")

ONE_ANSWER = AnswerSampling(num_samples=1, pass_k=(1,))
HELD_OUT = "held_out"  # name of the prompts of data.eval_path
EVAL_METRICS = ("true_accuracy", "true_accuracy_greedy", "grm_score", "reward", "grm_accuracy", "response_tokens")


@dataclass(slots=True, kw_only=True)
class AnswerProgress:
    """Answers that were played and judged, of those that an evaluation asks for. One that can't be played, and so gets
    no verdict, is done too.
    """

    name: str = ""
    answers: int = 0
    to_judge: int = 0
    played: int = 0
    judged: int = 0
    tokens: int = 0  # sampled

    def describe(self, took_s: float) -> str:
        """The line after `took_s` seconds."""
        return join_shown(
            f"evaluation {self.name}",
            counts_text("answers", self.played, self.answers),
            counts_text("verdicts", self.judged, self.to_judge),
            speed_text("policy", self.tokens, took_s),
            left_text(left_at_pace(self.played + self.judged, self.answers + self.to_judge, took_s)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRollout:
    """A held-out prompt and one judged answer to it.

    right:   how right it is by the rule, from 0 to 1; None without a reference that it can use.
    sample:  which of the answers to the prompt; None: the greedy one.
    rewards: on [0, 1], as composed (REWARD) and by each judge that was asked; None: its verdict failed. If a judge
             compares: beside the answer of the first evaluation to the same prompt, 0.5 if the two are alike.
    """

    prompt: Prompt
    rollout: Rollout
    report: JudgeReport
    right: float | None
    sample: int | None = 0
    rewards: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def reward(self) -> float | None:
        """Its reward as composed, on its own. None: the verdict failed."""
        return get_reward(self.report.verdict)


GreedyAnswer = tuple[float | None, JudgedRollout | None]  # how right it is; the answer, if it is judged


class AnswerJournal(Protocol):
    """A record of the answers of one evaluation, each written as it comes."""

    def rollout(self, prompt: Prompt, rollout: Rollout, sample: int | None, right: float | None) -> None: ...

    def record_verdict(self, rollout: Rollout, report: JudgeReport) -> None: ...


class Unrecorded:
    """For callers that read the answers at the end."""

    def rollout(self, prompt: Prompt, rollout: Rollout, sample: int | None, right: float | None) -> None:
        pass

    def record_verdict(self, rollout: Rollout, report: JudgeReport) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEvaluation:
    """The metrics by their names in summary.json, and the answers behind them.

    rollouts: sampled, in the order of the prompts. greedy: only if they are judged.
    """

    metrics: Metrics
    rollouts: tuple[JudgedRollout, ...]
    greedy: tuple[JudgedRollout, ...] = ()


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Plays held-out prompts, sampled and greedily; the sampled answers are judged.

    counting:   how many answers to a prompt are sampled, each with a seed of its own.
    greedy:     whether a greedy answer is played, too; judges_greedy: whether it is judged.
    places:     most answers in flight; None: no limit.
    journal:    gets each answer and each verdict as it comes.
    first:      the judge that judges every answer, where there are several: its verdicts count as the GRM's. None: the
                verdicts that make the reward do; their scores are on the first judge's scale.
    pass_reward: lowest reward with which a judge passes an answer; None if there is none.
    by_model:   whether a model judges, so that there is an accuracy of the GRM.
    compares:   whether one of the judges compares, so that an answer is also judged beside that in `start`.
    start:      prompt_id -> the answer of the first evaluation.
    deadline_s: results that come later than this after the last answer, on `clock`, are left out.
    make_health: gives the judge's health for one evaluation; None: any number of verdicts may fail.
    skill:      gets the accuracy of each of several judges.
    episodes:   gets what was played.
    progress:   shows how far an evaluation is, which `done` has.
    """

    prompts: Sequence[Prompt]
    play_sampled: Play
    play_greedy: Play
    judge: Judge
    is_right: Rule
    seed: int
    counting: AnswerSampling = ONE_ANSWER
    greedy: bool = True
    judges_greedy: bool = False
    places: asyncio.Semaphore | None = None
    journal: AnswerJournal = field(default_factory=Unrecorded)
    first: str | None = None
    pass_reward: float | None = None
    by_model: bool = True
    compares: bool = False
    start: dict[str, Rollout] = field(default_factory=dict)
    deadline_s: float = math.inf
    clock: ActiveClock | None = None
    make_health: Callable[[], ServiceHealth] | None = None
    skill: MeasuredSkill = field(default_factory=MeasuredSkill)
    episodes: EnvCounts = field(default_factory=EnvCounts)
    progress: Progress = field(default_factory=Progress)
    done: AnswerProgress = field(default_factory=AnswerProgress)

    async def evaluate(self, name: str, limit: int | None = None) -> HeldOutEvaluation:
        """Evaluate on the first `limit` prompts (all by default). `name` separates the requests of evaluations.

        Raises Unfit if the judge's service failed on too many answers.
        """
        prompts, clock = self.prompts[:limit], self.clock or ActiveClock()
        breaker = OutageBreaker(self.make_health(), clock) if self.make_health is not None else None
        judge = self.judge if breaker is None else breaker.guard(self.judge)
        with set_purpose("held_out"):
            sampled = [
                asyncio.create_task(self._judged(judge, make_request_id(name, i, sample), prompt, sample))
                for i, prompt in enumerate(prompts)
                for sample in range(self.counting.num_samples)
            ]
            greedy = [
                asyncio.create_task(self._greedy(judge, f"{name}-greedy-{i}", prompt))
                for i, prompt in enumerate(prompts if self.greedy else ())
            ]
        to_judge = len(sampled) + len(greedy) * self.judges_greedy
        self.done = AnswerProgress(name=name, answers=len(sampled) + len(greedy), to_judge=to_judge)
        with self.progress.show_while(self.done.describe):
            await self._until_ended([*sampled, *greedy], clock, breaker)
        if breaker is not None:
            breaker.check()
        judged = tuple(one for task in sampled if (one := _result(task)) is not None)
        greedy_answers = [answer for task in greedy if (answer := _result(task)) is not None]
        by_judge = {} if self.pass_reward is None else accuracy_by_judge(judged, self.pass_reward)
        self.skill.take_accuracies(by_judge)
        greedy_right = [right for right, _ in greedy_answers if right is not None]
        metrics = summarise(judged, greedy_right, self.first, self.pass_reward if self.by_model else None)
        metrics |= {f"{name}_accuracy": accuracy for name, accuracy in by_judge.items() if name != self.first}
        if self.counting.num_samples > 1:
            metrics |= with_ends(compute_figures(judged, self.counting, self.pass_reward))
        return HeldOutEvaluation(
            metrics=metrics,
            rollouts=judged,
            greedy=tuple(answer for _, answer in greedy_answers if answer is not None),
        )

    async def _until_ended(
        self,
        tasks: Sequence[asyncio.Task[JudgedRollout | None] | asyncio.Task[GreedyAnswer | None]],
        clock: ActiveClock,
        breaker: OutageBreaker | None,
    ) -> None:
        """Return once all tasks have ended, or none has for `deadline_s`; late ones are cancelled, and verdicts that
        are still missing count as timeouts.
        """
        ended = asyncio.Queue[asyncio.Task[object]]()
        for task in tasks:
            task.add_done_callback(ended.put_nowait)
        try:
            for number in range(len(tasks)):
                try:
                    async with clock.timeout(self.deadline_s) if self.deadline_s < math.inf else nullcontext():
                        done = await ended.get()
                except TimeoutError:
                    late = len(tasks) - number
                    log.warning("%d held-out answers are left out: no answer came for %g s", late, self.deadline_s)
                    if breaker is not None:
                        for _ in range(breaker.num_asked):
                            breaker.record(LATE.verdict)
                    break
                done.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _played(self, group_id: str, prompt: Prompt, play: Play) -> Rollout | None:
        request = RolloutRequest(group_id=group_id, sibling=0, seed=derive_seed(self.seed, group_id), priority=1)
        try:
            rollout = await play(request, prompt, ignore_first_token)
        except (EngineRefused, RolloutAborted, EpisodeFailed) as error:
            log.warning("held-out prompt %s could not be played: %s", prompt.prompt_id, error)
            if isinstance(error, EpisodeFailed):
                self.episodes.episode_failed(error.failures)
            return None
        finally:
            self.done.played += 1
        self.done.tokens += rollout.num_sampled_tokens
        self.episodes.rollout(rollout)
        return rollout

    async def _judged(self, judge: Judge, group_id: str, prompt: Prompt, sample: int | None) -> JudgedRollout | None:
        async with self.places or nullcontext():
            play = self.play_greedy if sample is None else self.play_sampled
            rollout = await self._played(group_id, prompt, play)
            if rollout is None:
                self.done.judged += 1
                return None
            right = self._right(prompt, rollout)
            self.journal.rollout(prompt, rollout, sample, right)
            report = await judge_alone(judge, prompt, rollout)
            answer = JudgedRollout(
                prompt=prompt,
                rollout=rollout,
                report=report,
                right=right,
                sample=sample,
                rewards=await self._beside_the_start(judge, prompt, rollout) if self.compares else rewards_by(report),
            )
        self.done.judged += 1
        self.journal.record_verdict(rollout, report)
        return answer

    async def _greedy(self, judge: Judge, group_id: str, prompt: Prompt) -> GreedyAnswer | None:
        if self.judges_greedy:
            answer = await self._judged(judge, group_id, prompt, None)
            return None if answer is None else (answer.right, answer)
        rollout = await self._played(group_id, prompt, self.play_greedy)
        if rollout is None:
            return None
        right = self._right(prompt, rollout)
        self.journal.rollout(prompt, rollout, None, right)
        return right, None

    def _right(self, prompt: Prompt, rollout: Rollout) -> float | None:
        """How right an answer is; None without a reference that the rule can use."""
        if prompt.reference is None:
            return None
        try:
            return self.is_right(rollout.answer, prompt.reference)
        except ValueError as error:
            log.warning("held-out prompt %s has no known truth: %s", prompt.prompt_id, error)
            return None

    async def _beside_the_start(self, judge: Judge, prompt: Prompt, rollout: Rollout) -> dict[str, float | None]:
        """The rewards of an answer beside that of the first evaluation: 0.5, plus half of the difference."""
        if (start := self.start.get(prompt.prompt_id)) is None:
            return {}
        pair = [replace(one, group_id=rollout.group_id, sibling=i) for i, one in enumerate((start, rollout))]
        then, now = map(rewards_by, await judge_group(judge, prompt, pair))
        return {
            name: None if reward is None or (before := then.get(name)) is None else (1 + reward - before) / 2
            for name, reward in now.items()
        }


def rewards_by(report: JudgeReport) -> dict[str, float | None]:
    """The reward as composed (REWARD) and by each judge that was asked; None: its verdict failed."""
    return {name: get_reward(one.verdict) for name, one in {REWARD: report, **report.by_judge}.items()}


def read_anchor(step: int, judged: Sequence[JudgedRollout]) -> AnchorReading | None:
    """What the reward-hacking alarm reads; None without answers of known truth. A judge that was asked about only some
    of the answers is left out: its mean would depend on which ones others chose for it.
    """
    right = mean_by_prompt((one.prompt.prompt_id, one.right) for one in judged)
    names = [name for name in judged[0].rewards if all(name in one.rewards for one in judged)] if judged else []
    found = {name: mean_by_prompt((one.prompt.prompt_id, one.rewards[name]) for one in judged) for name in names}
    rewards = {name: given for name, given in found.items() if given}
    if not right or not rewards:
        return None
    sources = {one.prompt.prompt_id: one.prompt.source for one in judged}
    return AnchorReading(step=step, right=right, rewards=rewards, sources=sources)


def mean_by_prompt(values: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """prompt_id -> the mean of what is known of its answers."""
    found: dict[str, list[float]] = {}
    for name, value in values:
        if value is not None:
            found.setdefault(name, []).append(value)
    return {name: statistics.fmean(own) for name, own in found.items()}


def make_request_id(name: str, index: int, sample: int) -> str:
    """The id of an answer, which decides its seed: a prompt's first answer has the same one however many there are."""
    return f"{name}-{index}" if sample == 0 else f"{name}-{index}.{sample}"


def _result(task: asyncio.Task[T]) -> T | None:
    return None if task.cancelled() else task.result()


def by_prompt(
    judged: Sequence[JudgedRollout], value: Callable[[JudgedRollout], float | None]
) -> dict[str, list[float]]:
    """prompt_id -> the values of its answers that have one."""
    found: dict[str, list[float]] = {}
    for one in judged:
        if (number := value(one)) is not None:
            found.setdefault(one.prompt.prompt_id, []).append(number)
    return found


def compute_figures(
    judged: Sequence[JudgedRollout], counting: AnswerSampling, pass_reward: float | None
) -> dict[str, Estimate]:
    """avg@n and pass@k by the verdicts, and, as true_*, by the rule where it can tell. A failed verdict is no number.
    pass_reward: the lowest reward of an answer that passes; None: no pass@k by the verdicts.
    """
    rewards, truths = by_prompt(judged, lambda one: one.reward), by_prompt(judged, lambda one: one.right)
    passed = {
        name: [float(reaches(reward, pass_reward)) for reward in own]
        for name, own in rewards.items()
        if pass_reward is not None
    }
    right = {name: [float(reaches(truth, 1.0)) for truth in own] for name, own in truths.items()}
    return figures(rewards, passed, counting) | figures(truths, right, counting, prefix="true_")


def summarise(
    judged: Sequence[JudgedRollout],
    greedy_right: Sequence[float],
    first: str | None = None,
    pass_reward: float | None = None,
) -> Metrics:
    """The measurable metrics only: a failed verdict enters no mean, an unknown truth no accuracy."""
    grm = verdicts_by(judged, first)
    rewards = [one.reward for one in judged if one.reward is not None]
    right = [one.right for one in judged if one.right is not None]
    metrics: Metrics = {}
    if right:
        metrics["true_accuracy"] = statistics.fmean(right)
    if greedy_right:
        metrics["true_accuracy_greedy"] = statistics.fmean(greedy_right)
    if grm:
        metrics["grm_score"] = statistics.fmean(verdict.score for _, verdict in grm)
    if rewards:
        metrics["reward"] = statistics.fmean(rewards)
    if pass_reward is not None and (sides := agreements(grm, pass_reward)):
        metrics["grm_accuracy"] = statistics.fmean(sides)
    if judged:
        metrics["response_tokens"] = statistics.fmean(one.rollout.num_sampled_tokens for one in judged)
    return metrics


RightAndVerdict = tuple[float | None, Verdict]  # how right an answer is, if that is known, and a verdict on it


def verdicts_by(judged: Sequence[JudgedRollout], judge: str | None) -> list[RightAndVerdict]:
    """A judge's verdicts on the answers about which it was asked; without a judge those that make the reward."""
    reports = [(one.right, one.report if judge is None else one.report.by_judge.get(judge)) for one in judged]
    return [
        (right, report.verdict)
        for right, report in reports
        if report is not None and isinstance(report.verdict, Verdict) and report.verdict.rewards
    ]


def agreements(verdicts: Sequence[RightAndVerdict], pass_reward: float) -> list[bool]:
    """Whether a judge passes and fails the same answers as the rule, for the answers with known truth."""
    known = [(right, verdict.outcome) for right, verdict in verdicts if right is not None]
    return [reaches(reward, pass_reward) == reaches(right, pass_reward) for right, reward in known]


def accuracy_by_judge(judged: Sequence[JudgedRollout], pass_reward: float) -> dict[str, float]:
    """Each judge's share of agreements, where there are several; empty with a single one."""
    names = dict.fromkeys(name for one in judged for name in one.report.by_judge)
    sides = {name: agreements(verdicts_by(judged, name), pass_reward) for name in names}
    return {name: statistics.fmean(some) for name, some in sides.items() if some}
