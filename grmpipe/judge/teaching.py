"""Teachers in the judge stage: each rollout is scored by its teacher, beside its judgement.

A verdict is final once both have answered. A failed score fails it, with the teacher's cause, unless scores are
optional; it is never a number.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from grmpipe.types import (
    Cause,
    Failed,
    Judge,
    JudgeReport,
    JudgeSession,
    JudgeTask,
    Prompt,
    Rollout,
    TeacherScores,
    Turn,
    Verdict,
    judge_tasks_of_turn,
)
from models.engines.request_gates import PrioritySemaphore
from models.types import EngineDied, EngineRefused, Generates, RequestContext, TokenScores, make_scoring_params
from scheduler.work_queue import BusyMeter

SCORING = "@teacher"  # in place of a judge's name in a task: no judge can have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A model that scores the tokens of the policy. Both have the same tokens.

    top_k: how many of its most likely tokens it gives in the place of each.
    meter: runs while requests are in flight.
    """

    name: str
    engine: Generates
    top_k: int = 0
    meter: BusyMeter = field(default_factory=BusyMeter)

    async def score(self, rollout: Rollout, priority: int = 0) -> TeacherScores | Failed:
        """Score all completions of a rollout, segment by segment, in the context that the policy had."""
        segments = rollout.segments()
        try:
            scored = await asyncio.gather(
                *(self._score(rollout, number, turns, priority) for number, turns in enumerate(segments))
            )
        except EngineRefused as error:
            return self._failed("refused", error)
        except EngineDied as error:
            return self._failed("died", error)
        found = TeacherScores(teacher=self.name, by_turn=tuple(scores for segment in scored for scores in segment))
        if not all(np.isfinite(scores.logprobs_N).all() for scores in found.by_turn):
            return self._failed("unparseable", ValueError("it gave a log-prob that isn't finite: check its dtype"))
        return found

    async def _score(
        self, rollout: Rollout, segment: int, turns: Sequence[tuple[tuple[int, ...], Turn]], priority: int
    ) -> list[TokenScores]:
        """The scores of each turn of a segment."""
        first, (prompt_ids, last) = len(turns[0][0]), turns[-1]
        token_ids = prompt_ids + last.completion.token_ids
        if len(token_ids) == first:
            return [make_no_scores(self.top_k) for _ in turns]
        context = RequestContext(
            request_id=f"{rollout.group_id}/{rollout.sibling}/{segment}@{self.name}",
            group_id=rollout.group_id,
            role=self.name,
            priority=priority,
        )
        with self.meter:
            completion = await self.engine.generate(token_ids, make_scoring_params(first, self.top_k), context)
        if completion.scores is None:
            raise EngineDied(f"{self.name} ended a request without scores: {completion.finish_reason}")
        return [
            cut_scores(completion.scores, len(before) - first, len(turn.completion.token_ids)) for before, turn in turns
        ]

    def _failed(self, cause: Cause, error: Exception) -> Failed:
        return Failed(stage="teacher", cause=cause, attempts=1, detail=f"{self.name}: {error}")


def make_no_scores(top_k: int) -> TokenScores:
    """The scores of no token."""
    none = (0, top_k)
    return TokenScores(
        logprobs_N=np.zeros(0, np.float32),
        top_ids_NK=np.zeros(none, np.int32) if top_k else None,
        top_logprobs_NK=np.zeros(none, np.float32) if top_k else None,
    )


def cut_scores(scores: TokenScores, start: int, count: int) -> TokenScores:
    """The scores of `count` of the tokens."""
    here = slice(start, start + count)
    ids, logprobs = scores.top_ids_NK, scores.top_logprobs_NK
    return TokenScores(
        logprobs_N=scores.logprobs_N[here],
        top_ids_NK=None if ids is None else ids[here],
        top_logprobs_NK=None if logprobs is None else logprobs[here],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachingJudge:
    """A judge whose verdicts have the scores of a teacher too.

    find_teacher: source of a prompt -> its teacher; None: none teaches it.
    places:       of the judge's tasks at once: those of teachers take none.
    required:     whether a rollout without scores has no verdict.
    """

    judge: Judge
    find_teacher: Callable[[str], Teacher | None]
    places: PrioritySemaphore
    required: bool = True

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        return TeachingSession(self, self.judge.open(prompt, group_id, size), self.find_teacher(prompt.source))


@dataclass(slots=True)
class TeachingSession:
    """A judge session, beside which a teacher, if there is one, scores each rollout."""

    owner: TeachingJudge
    session: JudgeSession
    teacher: Teacher | None
    _rollouts: dict[int, Rollout] = field(default_factory=dict)
    _reports: dict[int, JudgeReport] = field(default_factory=dict)  # that wait for their scores
    _taught: dict[int, TeacherScores | Failed] = field(default_factory=dict)

    def begin(self) -> Sequence[JudgeTask]:
        return self.session.begin()

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        tasks = self.session.add(rollout)
        if self.teacher is None:
            return tasks
        self._rollouts[rollout.sibling] = rollout
        return (*tasks, JudgeTask(members=(rollout.sibling,), judge=SCORING))

    def add_turn(self, so_far: Rollout) -> Sequence[JudgeTask]:
        return judge_tasks_of_turn(self.session, so_far)

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        if judge_task.judge == SCORING and self.teacher is not None:
            (sibling,) = judge_task.members
            self._taught[sibling] = await self.teacher.score(self._rollouts[sibling], priority)
        else:
            async with self.owner.places.enter(priority):
                reports = await self.session.judge(judge_task, priority)
            if self.teacher is None:
                return reports
            self._reports |= reports
        final = self._reports.keys() & self._taught.keys()
        return {sibling: self._join(self._reports.pop(sibling), self._taught[sibling]) for sibling in sorted(final)}

    def _join(self, report: JudgeReport, taught: TeacherScores | Failed) -> JudgeReport:
        verdict = report.verdict
        if isinstance(verdict, Verdict):
            if isinstance(taught, TeacherScores):
                verdict = replace(verdict, teacher=taught)
            elif self.owner.required:
                verdict = taught
        return replace(report, verdict=verdict, taught=taught)


@dataclass(frozen=True, slots=True)
class NoReward:
    """The judge of a run without rewards: its verdicts have none, and no judgement."""

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        return NoRewardSession()


class NoRewardSession:
    """Gives each rollout a verdict without a reward."""

    def begin(self) -> Sequence[JudgeTask]:
        return ()

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        return (JudgeTask(members=(rollout.sibling,)),)

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        verdict = Verdict(rewards=(), score=0.0, breakdown={}, score_std=0.0, num_judgements=0)
        return {sibling: JudgeReport(verdict=verdict) for sibling in judge_task.members}
