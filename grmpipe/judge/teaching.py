"""Teachers in the judge stage: each rollout is scored by its teacher, beside its judgement.

A verdict is final once both have answered. A failed score fails it, with the teacher's cause, unless scores are
optional; it is never a number. A teacher that reads more than the policy scores after the judge.
"""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from grmpipe.algorithm.distill import BETTER_ANSWER, CRITIQUE, REFERENCE, DistillConfig
from grmpipe.judge.grm import PromptRenderer
from grmpipe.judge.prompt_injection import fence_text
from grmpipe.judge.verdict import get_reward
from grmpipe.models.chat.chat_template import count_chars, off_loop_if_long
from grmpipe.models.request_gates import PrioritySemaphore
from grmpipe.models.types import (
    EngineDied,
    EngineRefused,
    Generates,
    Message,
    RequestContext,
    TokenScores,
    make_scoring_params,
)
from grmpipe.scheduler.work_queue import BusyMeter
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

SCORING = "@teacher"  # in place of a judge's name in a task: no judge can have it


# -- what a teacher reads after the prompt and the policy doesn't: a critique, the reference, a better answer ----------
# With the policy's own weights as its teacher this is self-distillation: from feedback (SDPO, arXiv 2601.20802) or from
# the reference (OPSD, arXiv 2601.18734).


Rollouts = Mapping[int, Rollout]  # siblings, by number: those that have ended
Reports = Mapping[int, JudgeReport]  # on them, those that are known


@dataclass(frozen=True, slots=True)
class Insertion:
    """Tokens in the place of those from `start` to `end` of a prompt. It may only be longer than them."""

    start: int
    end: int
    token_ids: tuple[int, ...]

    @property
    def num_more(self) -> int:
        """How much later the tokens after it stand."""
        return len(self.token_ids) - (self.end - self.start)

    def insert(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return token_ids[: self.start] + self.token_ids + token_ids[self.end :]


NO_INSERTION = Insertion(0, 0, ())


class TeacherContext:
    """A text with fields, after the last message of the prompt. Texts of models are fenced: they are no instructions.

    renderer: the policy's, whose prompts these are.
    """

    def __init__(self, distill: DistillConfig, renderer: PromptRenderer) -> None:
        assert distill.context is not None
        self._text, self._fields = distill.context, distill.context_fields
        self._renderer = renderer

    @property
    def waits(self) -> bool:
        """Whether it needs the reports on all siblings."""
        return BETTER_ANSWER in self._fields

    def find(self, prompt: Prompt, sibling: int, rollouts: Rollouts, reports: Reports) -> Insertion | None:
        """What to insert into the prompts of a sibling whose report is known. None: there is nothing to show, so that
        the rollout isn't taught.
        """
        known = {
            CRITIQUE: find_critique(sibling, reports),
            REFERENCE: prompt.reference or "",
            BETTER_ANSWER: find_better_answer(sibling, rollouts, reports),
        }
        if not all(known[field] for field in self._fields):
            return None
        shown = {field: text if field == REFERENCE else fence_text(text) for field, text in known.items()}
        rollout = rollouts[sibling]
        return self._insert(self._text.format(**shown), rollout.opening or prompt.messages, rollout)

    def _insert(self, text: str, messages: Sequence[Message], rollout: Rollout) -> Insertion | None:
        """The text after the last message, in the tokens of the rollout's prompts. A prompt may begin with tools, which
        the messages lack. None if a prompt doesn't have the message in this place: its history was rewritten.
        """
        *before, last = messages
        plain = self._renderer.render(messages)
        told = self._renderer.render((*before, replace(last, content=last.content + text)))
        first = next(iter(rollout.prompts()))
        alike = count_alike(plain, told)
        after = count_alike(plain[alike:][::-1], told[alike:][::-1])
        offset = len(first) - len(plain)
        start, end = offset + alike, len(first) - after
        if offset < 0 or first[start:] != plain[alike:]:
            return None
        if any(prompt_ids[:end] != first[:end] for prompt_ids in rollout.prompts()):
            return None
        return Insertion(start, end, told[alike : len(told) - after])


def count_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of entries until both differ."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def find_critique(sibling: int, reports: Reports) -> str:
    """What a judge wrote about a whole response, without its thoughts: the first judge that wrote anything, and of its
    judgements the one whose score is nearest to their mean. Empty: nothing.
    """
    for report in reports[sibling].own_reports.values():
        about = [one for one in report.judgements if one.siblings == (sibling,) and one.turn is None]
        if about:
            mean = statistics.fmean(one.scores[0] for one in about)
            return min(about, key=lambda one: abs(one.scores[0] - mean)).completion.answer.strip()
    return ""


def find_better_answer(sibling: int, rollouts: Rollouts, reports: Reports) -> str:
    """The answer of the sibling with the highest reward, the first of several. Empty if it is no higher than that of
    this one.
    """
    rewards = {one: get_reward(report.verdict) for one, report in reports.items()}
    known = {one: reward for one, reward in rewards.items() if reward is not None}
    best = max(known, key=lambda one: (known[one], -one), default=sibling)
    return rollouts[best].answer.strip() if known.get(best, 0.0) > known.get(sibling, float("inf")) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A model that scores the tokens of the policy. Both have the same tokens.

    top_k:   how many of its most likely tokens it gives for each place.
    context: what it reads and the policy doesn't; None: nothing.
    meter:   runs while requests are in flight.
    """

    name: str
    engine: Generates
    top_k: int = 0
    context: TeacherContext | None = None
    meter: BusyMeter = field(default_factory=BusyMeter)

    async def score(
        self, rollout: Rollout, priority: int = 0, more: Insertion = NO_INSERTION
    ) -> TeacherScores | Failed:
        """Score all completions of a rollout, segment by segment, in the context that the policy had, and more."""
        segments = rollout.segments()
        try:
            scored = await asyncio.gather(
                *(self._score(rollout, number, turns, priority, more) for number, turns in enumerate(segments))
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
        self,
        rollout: Rollout,
        segment: int,
        turns: Sequence[tuple[tuple[int, ...], Turn]],
        priority: int,
        more: Insertion,
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
        params = make_scoring_params(first + more.num_more, self.top_k)
        with self.meter:
            completion = await self.engine.generate(more.insert(token_ids), params, context)
        if completion.scores is None:
            raise EngineDied(f"{self.name} ended a request without scores: {completion.finish_reason}")
        return [
            cut_scores(completion.scores, len(before) - first, len(turn.completion.token_ids)) for before, turn in turns
        ]

    def _failed(self, cause: Cause, error: Exception) -> Failed:
        return Failed(stage="teacher", cause=cause, attempts=1, detail=f"{self.name}: {error}")


def make_no_scores(top_k: int) -> TokenScores:
    """Scores of zero tokens."""
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
    places:       limits the judge's tasks at once: those of teachers take none.
    required:     whether a rollout without scores has no verdict.
    """

    judge: Judge
    find_teacher: Callable[[str], Teacher | None]
    places: PrioritySemaphore
    required: bool = True

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        session, teacher = self.judge.open(prompt, group_id, size), self.find_teacher(prompt.source)
        if teacher is None or teacher.context is None:
            return TeachingSession(self, session, teacher)
        return ToldTeachingSession(self, session, teacher, teacher.context, prompt, size)

    def join(self, report: JudgeReport, taught: TeacherScores | Failed) -> JudgeReport:
        verdict = report.verdict
        if isinstance(verdict, Verdict):
            if isinstance(taught, TeacherScores):
                verdict = replace(verdict, teacher=taught)
            elif self.required:
                verdict = taught
        return replace(report, verdict=verdict, taught=taught)


@dataclass(slots=True)
class TeachingSession:
    """A judge session. Beside it a teacher, if there is one, scores each rollout."""

    owner: TeachingJudge
    session: JudgeSession
    teacher: Teacher | None
    _rollouts: dict[int, Rollout] = field(default_factory=dict)
    _reports: dict[int, JudgeReport] = field(default_factory=dict)  # those that wait for their scores
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
        # Outside of the judge's places: a teacher is another model, and a slow judge doesn't hold it up.
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
        return {
            sibling: self.owner.join(self._reports.pop(sibling), self._taught[sibling]) for sibling in sorted(final)
        }


@dataclass(slots=True)
class ToldTeachingSession:
    """A judge session, after which a teacher scores each rollout. It reads more than the policy: judges' reports."""

    owner: TeachingJudge
    session: JudgeSession
    teacher: Teacher
    context: TeacherContext
    prompt: Prompt
    size: int
    _rollouts: dict[int, Rollout] = field(default_factory=dict)
    _reports: dict[int, JudgeReport] = field(default_factory=dict)
    _scored: set[int] = field(default_factory=set)

    def begin(self) -> Sequence[JudgeTask]:
        return self._as_of_group(self.session.begin())

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        self._rollouts[rollout.sibling] = rollout
        return self._as_of_group(self.session.add(rollout))

    def add_turn(self, so_far: Rollout) -> Sequence[JudgeTask]:
        return self._as_of_group(judge_tasks_of_turn(self.session, so_far))

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        part = judge_task.part if judge_task.judge == SCORING else judge_task
        assert part is not None, "a task of the group is a task of the judge"
        async with self.owner.places.enter(priority):
            self._reports |= await self.session.judge(part, priority)
        if self.context.waits and len(self._reports) < self.size:
            return {}
        final = sorted(self._reports.keys() - self._scored)
        self._scored.update(final)
        return dict(zip(final, await asyncio.gather(*(self._score(one, priority) for one in final)), strict=True))

    async def _score(self, sibling: int, priority: int) -> JudgeReport:
        """The report on a sibling with its scores. A failed one needs none."""
        report = self._reports[sibling]
        if isinstance(report.verdict, Failed):
            return report
        find = partial(self.context.find, self.prompt, sibling, self._rollouts, dict(self._reports))
        more = await off_loop_if_long(count_chars(self.prompt.messages), find)
        if more is None:
            return report
        return self.owner.join(report, await self.teacher.score(self._rollouts[sibling], priority, more))

    def _as_of_group(self, tasks: Sequence[JudgeTask]) -> Sequence[JudgeTask]:
        """The same tasks; as tasks of the whole group where a sibling's context shows what others got: then none of
        them is skipped after a resume while a verdict of the group is missing.
        """
        if not self.context.waits:
            return tasks
        group = tuple(range(self.size))
        return [
            JudgeTask(members=group if task.members else (), turn=task.turn, judge=SCORING, part=task) for task in tasks
        ]


@dataclass(frozen=True, slots=True)
class NoReward:
    """The judge of a run without rewards: its verdicts have neither rewards nor judgements."""

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
