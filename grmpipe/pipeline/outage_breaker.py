"""The breaker of judging beside training: evaluations, judging again, canaries. Only outages of the judge count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grmpipe.pipeline.service_health import ServiceHealth
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.types import Failed, Judge, JudgeReport, JudgeSession, JudgeTask, Prompt, Rollout


class OutageBreaker:
    """Pauses judging above the failure rate and then raises Unfit, as in training, but only for outages: the judge was
    asked, and refused, timed out or died. Unparseable, truncated and tied verdicts are what an evaluation measures.

    clock: stands still in a pause. num_asked: rollouts that the judge has been asked about, without an answer so far.
    """

    def __init__(self, health: ServiceHealth, clock: ActiveClock | None = None) -> None:
        self.num_asked = 0
        self._health = health
        self._clock = clock or ActiveClock()

    async def until_fit(self) -> None:
        await self._health.until_fit(self._clock)

    def record(self, result: object) -> None:
        """Count a verdict, or a judgement. Raises Unfit when the outage has lasted."""
        self._health.record(only_outage(result))

    def count(self, result: object) -> None:
        """Count one of an earlier process, for `check` alone."""
        self._health.count(only_outage(result))

    def check(self) -> None:
        """Raises Unfit if outages left too little to measure. Called before any figure is made."""
        self._health.check()

    def guard(self, judge: Judge) -> Judge:
        return _GuardedJudge(judge, self)


def only_outage(result: object) -> Failed | None:
    return result if isinstance(result, Failed) and result.is_outage else None


@dataclass(frozen=True, slots=True)
class _GuardedJudge:
    judge: Judge
    breaker: OutageBreaker

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        return _GuardedSession(self.judge.open(prompt, group_id, size), self.breaker)


@dataclass(frozen=True, slots=True)
class _GuardedSession:
    session: JudgeSession
    breaker: OutageBreaker

    def begin(self) -> Sequence[JudgeTask]:
        return self.session.begin()

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        return self.session.add(rollout)

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        await self.breaker.until_fit()
        self.breaker.num_asked += len(judge_task.members)
        try:
            reports = await self.session.judge(judge_task, priority)
        finally:
            self.breaker.num_asked -= len(judge_task.members)
        for report in reports.values():
            self.breaker.record(report.verdict)
        return reports
