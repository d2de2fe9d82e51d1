"""Hearings of judges that take each rollout by itself, and of groups of one. Asks nobody by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from grmpipe.types import Failed, Hearing, Judge, JudgeReport, Prompt, Rollout, Sitting


@runtime_checkable
class RolloutJudge(Protocol):
    """Judges one rollout, whatever its siblings are. Failures come back as values."""

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport: ...


@dataclass(frozen=True, slots=True)
class OneByOne:
    """A judge of rollouts as a judge of groups."""

    judge: RolloutJudge

    def open(self, prompt: Prompt, group_id: str, size: int) -> Hearing:
        return OneByOneHearing(self.judge, prompt)


class OneByOneHearing:
    """A rollout is judged as soon as it has ended."""

    def __init__(self, judge: RolloutJudge, prompt: Prompt) -> None:
        self._judge = judge
        self._prompt = prompt
        self._rollouts: dict[int, Rollout] = {}

    def begin(self) -> Sequence[Sitting]:
        return ()

    def add(self, rollout: Rollout) -> Sequence[Sitting]:
        self._rollouts[rollout.sibling] = rollout
        return (Sitting(members=(rollout.sibling,)),)

    async def judge(self, sitting: Sitting, priority: int = 0) -> Mapping[int, JudgeReport]:
        (sibling,) = sitting.members
        return {sibling: await self._judge.judge(self._prompt, self._rollouts[sibling], priority)}


async def judge_alone(judge: Judge, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
    """The report on a rollout without siblings. Refused by a judge that only compares."""
    hearing = judge.open(prompt, rollout.group_id, 1)
    reports: dict[int, JudgeReport] = {}
    for sitting in (*hearing.begin(), *hearing.add(rollout)):
        reports |= await hearing.judge(sitting, priority)
    if rollout.sibling in reports:
        return reports[rollout.sibling]
    failure = Failed(stage="judge", cause="refused", attempts=0, detail="this judge compares: one rollout is too few")
    return JudgeReport(verdict=failure, failures=(failure,))
