"""The health of judge, policy, environments and teachers: a circuit breaker that pauses work, then stops the run; and
what each of them counts as a failure.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from grmpipe.config.run_config import ConfigError
from grmpipe.judge.monitor.position_bias import PositionBias, bias_metrics
from grmpipe.pipeline.group import Group
from grmpipe.pipeline.interfaces import KILLED_ENGINES, FlowConfig
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.types import (
    Cause,
    EnvCause,
    Failed,
    InfraCause,
    Judge,
    JudgeReport,
    JudgeSession,
    JudgeTask,
    Metrics,
    Prompt,
    Rollout,
)

log = logging.getLogger(__name__)

HealthState = Literal["closed", "open", "half-open", "stopped"]
VERDICTS_WINDOW = 256  # the latest verdicts that a judge's rate of failures is measured over: two steps of the defaults


class Unfit(Exception):
    """Too much failed before a pause and after it. No result was made up instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentResult:
    """A result that is remembered. cause: why it failed; None: a success. of: whose failure it is, if known."""

    cause: Cause | None
    of: tuple[str, ...] = ()


SUCCESS = RecentResult(cause=None)


class ServiceHealth:
    """A circuit breaker. Closed, it lets work through; open, it pauses work; half-open, it lets work through on trial;
    stopped, it raises.

    It opens by the share of failures in a sliding window, once a quarter of the window is filled. After the pause it is
    half-open, with an empty window: a whole window below the rate closes it, too many failures stop it.

    work:    what pauses, for the log.
    counted: what is counted, in the plural.
    key:     the configuration key that sets the rate.
    now:     seconds of a clock; by default the running loop's.
    """

    def __init__(
        self,
        work: str,
        *,
        max_failure_rate: float,
        window: int,
        pause_s: float,
        counted: str,
        key: str,
        now: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
    ) -> None:
        self._work = work
        self._counted = counted
        self._key = key
        self._max_failure_rate = max_failure_rate
        self._window = window
        self._pause_s = pause_s
        self._now = now
        self._recent: deque[RecentResult] = deque(maxlen=window)
        self._total = Counter[Cause | None]()  # all results, those in pauses too
        self._last_detail = ""
        self._state: HealthState = "closed"
        self._paused_until_s = 0.0
        self._num_on_trial = 0
        self._logged_cause = ""
        self.cause = ""  # why work paused or stopped, in plain words; empty if it never did

    @property
    def state(self) -> HealthState:
        if self._state == "open" and self._now() >= self._paused_until_s:
            self._state = "half-open"
            self._recent.clear()
            self._num_on_trial = 0
        return self._state

    @property
    def pause_left_s(self) -> float:
        """Seconds left of the pause; 0 if work may continue, and 0 if it never will."""
        return self._paused_until_s - self._now() if self.state == "open" else 0.0

    def record(self, result: object, of: Sequence[str] = ()) -> None:
        """Count a result: a Failed is a failure, anything else a success. Results during a pause are ignored: their
        work began before it. Raises Unfit when it stops.

        of: the judges whose failure it is, where there are several.
        """
        self.count(result)
        if self.state in ("closed", "half-open"):
            self._num_on_trial += 1
            if isinstance(result, Failed):
                self._recent.append(RecentResult(cause=result.cause, of=tuple(of)))
            else:
                self._recent.append(SUCCESS)
            if self._exceeds():
                self._open(self._explain())
            elif self._num_on_trial >= self._window:
                self._state = "closed"
        self._raise_if_stopped()

    def count(self, result: object) -> None:
        """Count a result for `check` alone."""
        self._total[result.cause if isinstance(result, Failed) else None] += 1
        if isinstance(result, Failed):
            self._last_detail = result.detail

    def trip(self, cause: str) -> None:
        """Open for a reason other than failures. Raises Unfit if it is half-open, and when it has stopped."""
        if self.state in ("closed", "half-open"):
            self._open(cause + self._again())
        self._raise_if_stopped()

    def check(self) -> None:
        """Raises Unfit if more of all results than the rate failed, or every one, however few there are."""
        num_seen, num_failed = self._total.total(), self._total.total() - self._total[None]
        if num_failed > self._max_failure_rate * num_seen or num_failed == num_seen > 0:
            raise Unfit(self._describe(self._total, "", ""))

    async def until_fit(self, clock: ActiveClock) -> None:
        """Wait for the end of a pause; deadlines stand still meanwhile."""
        while (left_s := self.pause_left_s) > 0:
            if self._logged_cause != self.cause:
                self._logged_cause = self.cause
                log.warning("%s pauses for %.0f s: %s", self._work, left_s, self.cause)
            with clock.pause():
                await asyncio.sleep(left_s)

    def _raise_if_stopped(self) -> None:
        if self._state == "stopped":
            raise Unfit(self.cause)

    def _exceeds(self) -> bool:
        num_failed = len(self._recent) - self._recent.count(SUCCESS)
        enough = len(self._recent) >= max(1, self._window // 4)
        return enough and num_failed > self._max_failure_rate * len(self._recent)

    def _open(self, cause: str) -> None:
        self.cause = cause
        if self._state == "half-open":
            self._state = "stopped"
        else:
            self._state, self._paused_until_s = "open", self._now() + self._pause_s

    def _again(self) -> str:
        return f", again after a pause of {self._pause_s:g} s" if self._state == "half-open" else ""

    def _explain(self) -> str:
        by_judge = Counter(name for seen in self._recent for name in seen.of)
        judges = ", ".join(f"{name} in {count}" for name, count in by_judge.most_common())
        which = f"; judges that failed: {judges}" if judges else ""
        return self._describe(Counter(seen.cause for seen in self._recent), "the last ", self._again(), which)

    def _describe(self, results: Counter[Cause | None], last: str, again: str, which: str = "") -> str:
        """results: by cause, None for a success."""
        num_seen, num_failed = results.total(), results.total() - results[None]
        causes = ", ".join(f"{count} {cause}" for cause, count in results.most_common() if cause is not None)
        return (
            f"{num_failed} of {last}{num_seen} {self._counted} failed ({num_failed / num_seen:.0%}; "
            f"{self._key}={self._max_failure_rate:g}){again}: {causes}{which}"
            + (f"; the last one: {self._last_detail}" if self._last_detail else "")
        )


CAUSES: Mapping[str, InfraCause] = {  # causes of dropped groups that are the fault of the policy's engines
    "rollout_refused": "refused",
    "rollout_timeout": "timeout",
    "rollout_died": "died",
    KILLED_ENGINES: "died",
}
GROUPS_IN_VIEW = 32  # the latest ones, whose failures count
EPISODES_IN_VIEW = 64
NUM_FIRST = 8  # episodes; if all of these fail through the environment's own code, it never worked
OWN_CODE: tuple[EnvCause, ...] = ("broken", "protocol")


class FlowHealth:
    """Pauses the admission of groups while engines or environments fail too often, and then stops the run."""

    def __init__(self, config: FlowConfig) -> None:
        self._engines = ServiceHealth(
            "rolling out",
            max_failure_rate=config.rollout_max_failure_rate,
            window=GROUPS_IN_VIEW,
            pause_s=config.pause_s,
            counted="groups",
            key="rollout.max_failure_rate",
        )
        self._envs = ServiceHealth(
            "playing",
            max_failure_rate=config.env_max_failure_rate,
            window=EPISODES_IN_VIEW,
            pause_s=config.pause_s,
            counted="episodes",
            key="env.max_failure_rate",
        )
        self._num_broken = 0  # how many first episodes failed so; -1: one did not

    async def until_fit(self, clock: ActiveClock) -> None:
        await self._engines.until_fit(clock)
        await self._envs.until_fit(clock)

    def group_ended(self, group: Group) -> None:
        """Count a group that ended with all its rollouts, or because the policy's engines failed. Raises Unfit if it
        stops the run.
        """
        if (cause := CAUSES.get(group.cause)) is not None:
            self._engines.record(Failed(stage="rollout", cause=cause, attempts=1, detail=group.detail))
        elif group.is_rolled_out:
            self._engines.record(group)

    def episode_ended(self, result: object) -> None:
        """Count an ended episode: a Failed if its environment failed in all attempts, or anything else. Raises Unfit if
        it stops the run, and ConfigError for an environment that never worked.
        """
        if not (isinstance(result, Failed) and result.cause in OWN_CODE):
            self._num_broken = -1
        elif self._num_broken >= 0:
            self._num_broken += 1
            if self._num_broken == NUM_FIRST:
                raise ConfigError(
                    f"env: the first {NUM_FIRST} episodes all failed by an error of the environment itself; "
                    f"the last one: {result.detail}; run.log has the traceback"
                )
        self._envs.record(result)


class JudgeHealth:
    """Pauses judging above the failure rate, and then stops the run.

    teaching: the same for the teachers' scores; None without teachers.
    """

    def __init__(self, health: ServiceHealth, teaching: ServiceHealth | None = None) -> None:
        self._health = health
        self._teaching = teaching
        self._bias: dict[str, PositionBias] = {}  # by judge; a single one's is under an empty name

    async def until_fit(self, clock: ActiveClock) -> None:
        await self._health.until_fit(clock)
        if self._teaching is not None:
            await self._teaching.until_fit(clock)

    def verdict(self, report: JudgeReport) -> None:
        """Count a verdict. Raises Unfit if it stops the run."""
        for name, own in report.own_reports.items():
            self._bias[name] = self._bias.get(name, PositionBias()).with_judgements(own.judgements)
        if self._teaching is not None and report.taught is not None:
            self._teaching.record(report.taught)
        if isinstance(report.verdict, Failed) and report.verdict.stage == "teacher":
            return  # the judge had a verdict
        failed = [name for name, own in report.by_judge.items() if isinstance(own.verdict, Failed)]
        self._health.record(report.verdict, failed)

    def trip(self, cause: str) -> None:
        """Pause for a cause that no verdict shows. Raises Unfit if it stops the run."""
        self._health.trip(cause)

    def bias_metrics(self) -> Metrics:
        """Order flips, ties and wins of the first place since the last call, also by judge if there are several. Empty
        for judges of single responses.
        """
        metrics, self._bias = bias_metrics(self._bias), {}
        return metrics


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
        """Count a result of an earlier process, for `check` alone."""
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
