"""Adapts judges of single rollouts to groups, and judges groups outside the pipeline."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from grmpipe.judge.verdict import make_failure, only_finite, report_failures
from grmpipe.models.types import Completion, Message, VersionSpan
from grmpipe.types import Judge, JudgeReport, JudgeSession, JudgeTask, Prompt, Rollout, Turn


@runtime_checkable
class RolloutJudge(Protocol):
    """Judges one rollout, independently of its siblings. Failures are returned as values."""

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport: ...


@dataclass(frozen=True, slots=True)
class PointwiseAdapter:
    """A judge of rollouts as a judge of groups."""

    judge: RolloutJudge

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        async def judge(rollouts: Sequence[Rollout], priority: int) -> Sequence[JudgeReport]:
            return [await self.judge.judge(prompt, rollout, priority) for rollout in rollouts]

        return HandOver(judge, 1)


class HandOver:
    """A judge session that hands over `size` rollouts at a time: each as soon as it has ended, or a whole group."""

    def __init__(self, judge: Callable[[Sequence[Rollout], int], Awaitable[Sequence[JudgeReport]]], size: int) -> None:
        """judge: (rollouts, priority) -> their reports, in their order."""
        self._judge = judge
        self._size = size
        self._waiting: list[int] = []
        self._rollouts: dict[int, Rollout] = {}

    def begin(self) -> Sequence[JudgeTask]:
        return ()

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        self._rollouts[rollout.sibling] = rollout
        self._waiting.append(rollout.sibling)
        if len(self._waiting) < self._size:
            return ()
        members, self._waiting = tuple(sorted(self._waiting)), []
        return (JudgeTask(members=members),)

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        rollouts = [self._rollouts[sibling] for sibling in judge_task.members]
        return dict(zip(judge_task.members, await self._judge(rollouts, priority), strict=True))


async def judge_group(
    judge: Judge, prompt: Prompt, rollouts: Sequence[Rollout], priority: int = 0
) -> tuple[JudgeReport, ...]:
    """The reports on all siblings of a group (at least one), in their order. The lowest priority goes first.

    A sibling without a report has failed as refused: a comparing judge can't take a rollout by itself.
    """
    session = judge.open(prompt, rollouts[0].group_id, len(rollouts))
    judge_tasks = list(session.begin())
    for rollout in rollouts:
        judge_tasks += session.add(rollout)
    reports: dict[int, JudgeReport] = {}
    for final in await asyncio.gather(*(session.judge(judge_task, priority) for judge_task in judge_tasks)):
        reports |= {sibling: only_finite(report) for sibling, report in final.items()}
    return tuple(reports.get(rollout.sibling, NOT_TAKEN) for rollout in rollouts)


async def judge_alone(judge: Judge, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
    """The report on a rollout without siblings."""
    (report,) = await judge_group(judge, prompt, [rollout], priority)
    return report


NOT_TAKEN = report_failures(make_failure("refused", "this judge compares: one response is too few"))
NOBODY = VersionSpan(model="nobody", version=0, start=0, end=0)


def rollout_of_text(group_id: str, sibling: int, text: str) -> Rollout:
    """A text as a rollout. It has no tokens, so nothing can be trained on it."""
    return Rollout(group_id=group_id, sibling=sibling, turns=(turn_of_text(text),), status="finished")


def rollout_of_messages(group_id: str, sibling: int, messages: Sequence[Message]) -> Rollout:
    """An episode as a rollout, without tokens: what the environment began with, then each message of the assistant with
    the replies to it. At least one message is the assistant's.
    """
    opening: list[Message] = []
    turns: list[Turn] = []
    for message in messages:
        if message.role == "assistant":
            turns.append(turn_of_text(message.content))
        elif turns:
            turns[-1] = replace(turns[-1], replies=(*turns[-1].replies, message))
        else:
            opening.append(message)
    return Rollout(group_id=group_id, sibling=sibling, turns=tuple(turns), status="finished", opening=tuple(opening))


def turn_of_text(text: str) -> Turn:
    completion = Completion(token_ids=(), logprobs=(), text=text, finish_reason="stop", versions=(NOBODY,))
    return Turn(new_ids=(), completion=completion)


async def judge_together(
    judge: Judge, prompt: Prompt, group_id: str, texts: Sequence[str], priority: int = 0
) -> tuple[JudgeReport, ...]:
    """The reports on all texts, in their order, as on the siblings of one group (see judge_group).

    The judgements depend on the group id: under the same id the same engine repeats them.
    """
    return await judge_group(
        judge, prompt, [rollout_of_text(group_id, i, text) for i, text in enumerate(texts)], priority
    )
