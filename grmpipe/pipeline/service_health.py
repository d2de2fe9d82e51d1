"""Whether a service (judge, policy, environments) is healthy: a circuit breaker pauses work, then stops the run."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from grmpipe.config.run_config import ConfigError
from grmpipe.judge.monitor.position_bias import PositionBias, bias_metrics
from grmpipe.pipeline.group import Group
from grmpipe.pipeline.interfaces import KILLED_ENGINES, FlowConfig
from grmpipe.types import Cause, EnvCause, Failed, InfraCause, JudgeReport, Metrics
from scheduler.clock import ActiveClock

log = logging.getLogger(__name__)

CAUSES: Mapping[str, InfraCause] = {  # causes of dropped groups that are the fault of the policy's engines
    "rollout_refused": "refused",
    "rollout_timeout": "timeout",
    "rollout_died": "died",
    KILLED_ENGINES: "died",
}
NUM_FIRST = 8  # episodes; if all of these fail through the environment's own code, it never worked
OWN_CODE: tuple[EnvCause, ...] = ("broken", "protocol")

BreakerState = Literal["closed", "open", "half-open", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentResult:
    """A result as the breaker remembers it. cause: of a failure; None: a success. of: whose failure it is, if known."""

    cause: Cause | None
    of: tuple[str, ...] = ()


SUCCESS = RecentResult(cause=None)


class CircuitBreaker:
    """Closed, it lets work through; open, it pauses work; half-open, it lets work through on trial; stopped, for good.

    It opens by the share of failures in a sliding window, once a quarter of the window is filled. After the pause it is
    half-open, with an empty window: a whole window below the rate closes it, too many failures stop it.

    counted: what is counted, in the plural. key: the configuration key that sets the rate.
    """

    def __init__(
        self,
        *,
        max_failure_rate: float,
        window: int,
        pause_s: float,
        counted: str = "verdicts",
        key: str = "judge.max_failure_rate",
    ) -> None:
        self._counted = counted
        self._key = key
        self._max_failure_rate = max_failure_rate
        self._window = window
        self._pause_s = pause_s
        self._recent: deque[RecentResult] = deque(maxlen=window)
        self._last_detail = ""
        self._state: BreakerState = "closed"
        self._paused_until_s = 0.0
        self._num_on_trial = 0
        self._cause = ""

    def state(self, now_s: float) -> BreakerState:
        if self._state == "open" and now_s >= self._paused_until_s:
            self._state = "half-open"
            self._recent.clear()
            self._num_on_trial = 0
        return self._state

    def seconds_to_pause(self, now_s: float) -> float:
        """Seconds left of the pause; 0 if judging may continue, and 0 if it never will."""
        return self._paused_until_s - now_s if self.state(now_s) == "open" else 0.0

    def record(self, result: object, now_s: float, of: Sequence[str] = ()) -> None:
        """Count a result: a Failed is a failure, anything else a success. Results during a pause are ignored: their
        work began before it.

        of: of several judges, those whose failure it is.
        """
        if self.state(now_s) in ("open", "stopped"):
            return
        self._recent.append(RecentResult(cause=result.cause, of=tuple(of)) if isinstance(result, Failed) else SUCCESS)
        self._num_on_trial += 1
        if isinstance(result, Failed):
            self._last_detail = result.detail
        if self._exceeds():
            self._open(self._explain(), now_s)
        elif self._num_on_trial >= self._window:
            self._state = "closed"

    def trip(self, cause: str, now_s: float) -> None:
        """Open for a reason other than failures; stop if it is half-open."""
        if self.state(now_s) in ("closed", "half-open"):
            self._open(cause + self._again(), now_s)

    def stop_cause(self) -> str:
        """Why judging paused or stopped, in plain words; empty if it never did."""
        return self._cause

    def _exceeds(self) -> bool:
        num_failed = len(self._recent) - self._recent.count(SUCCESS)
        enough = len(self._recent) >= max(1, self._window // 4)
        return enough and num_failed > self._max_failure_rate * len(self._recent)

    def _open(self, cause: str, now_s: float) -> None:
        self._cause = cause
        if self._state == "half-open":
            self._state = "stopped"
        else:
            self._state, self._paused_until_s = "open", now_s + self._pause_s

    def _again(self) -> str:
        return f", again after a pause of {self._pause_s:g} s" if self._state == "half-open" else ""

    def _explain(self) -> str:
        counts = Counter(seen.cause for seen in self._recent if seen.cause is not None)
        num_seen, num_failed = len(self._recent), counts.total()
        causes = ", ".join(f"{count} {cause}" for cause, count in counts.most_common())
        by_judge = Counter(name for seen in self._recent for name in seen.of)
        judges = ", ".join(f"{name} in {count}" for name, count in by_judge.most_common())
        return (
            f"{num_failed} of the last {num_seen} {self._counted} failed ({num_failed / num_seen:.0%}; "
            f"{self._key}={self._max_failure_rate:g}){self._again()}: {causes}"
            + (f"; judges that failed: {judges}" if judges else "")
            + (f"; the last one: {self._last_detail}" if self._last_detail else "")
        )


class Unfit(Exception):
    """Too much failed before a pause and after it. No result was made up instead."""


class JudgeUnfit(Unfit):
    """Too many verdicts failed."""


class Fitness:
    """Pauses work while its gate is closed, and raises `unfit` once it is closed for good."""

    work = ""
    unfit = Unfit

    def __init__(self, breaker: CircuitBreaker) -> None:
        self._breaker = breaker
        self._loop = asyncio.get_running_loop()
        self._logged_cause = ""

    def record(self, result: object, of: Sequence[str] = ()) -> None:
        """Count a result: a Failed is a failure, all else a success. Raises `unfit` when the gate closes for good.

        of: of several judges, those whose failure it is.
        """
        self._breaker.record(result, self._loop.time(), of)
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self._breaker.state(self._loop.time()) == "stopped":
            raise self.unfit(self._breaker.stop_cause())

    async def until_fit(self, clock: ActiveClock) -> None:
        """Wait for the end of a pause; deadlines stand still meanwhile."""
        while (left_s := self._breaker.seconds_to_pause(self._loop.time())) > 0:
            if self._logged_cause != self._breaker.stop_cause():
                self._logged_cause = self._breaker.stop_cause()
                log.warning("%s pauses for %.0f s: %s", self.work, left_s, self._logged_cause)
            with clock.paused():
                await asyncio.sleep(left_s)


class JudgeFitness(Fitness):
    """Pauses judging above the failure rate, and then stops the run (guarantee 1)."""

    work = "judging"
    unfit = JudgeUnfit

    def __init__(self, breaker: CircuitBreaker) -> None:
        super().__init__(breaker)
        self._bias: dict[str, PositionBias] = {}  # by judge; of a single one under no name

    def verdict(self, report: JudgeReport) -> None:
        """Count a verdict. Raises JudgeUnfit when the gate closes for good."""
        for name, own in report.own_reports.items():
            self._bias[name] = self._bias.get(name, PositionBias()).with_judgements(own.judgements)
        self.record(report.verdict, [name for name, own in report.by_judge.items() if isinstance(own.verdict, Failed)])

    def trip(self, cause: str) -> None:
        """Pause for a cause that no verdict shows. Raises JudgeUnfit if it stops the run."""
        self._breaker.trip(cause, self._loop.time())
        self._raise_if_stopped()

    def bias_metrics(self) -> Metrics:
        """Order flips, ties and wins of the first place since the last call, also by judge if there are several. Empty
        for judges of single responses.
        """
        metrics, self._bias = bias_metrics(self._bias), {}
        return metrics


class PolicyUnfit(Unfit):
    """Too many groups ended without their rollouts."""


class PolicyFitness(Fitness):
    """Counts ended groups: with all rollouts, or dropped because the policy's engines failed."""

    work = "rolling out"
    unfit = PolicyUnfit

    @classmethod
    def of(cls, config: FlowConfig) -> PolicyFitness:
        breaker = CircuitBreaker(
            max_failure_rate=config.rollout_max_failure_rate,
            window=config.rollout_failure_window,
            pause_s=config.rollout_pause_s,
            counted="groups",
            key="rollout.max_failure_rate",
        )
        return cls(breaker)

    def group_ended(self, group: Group) -> None:
        """Count an ended group that sent requests. Raises PolicyUnfit when the gate closes for good."""
        if (cause := CAUSES.get(group.cause)) is not None:
            self.record(Failed(stage="rollout", cause=cause, attempts=1, detail=group.detail))
        elif group.is_rolled_out:
            self.record(group)


class EnvUnfit(Unfit):
    """Too many episodes ended because their environment failed in every attempt."""


class EnvFitness(Fitness):
    """Counts episodes: played to their end, or failed by the environment in all their attempts."""

    work = "playing"
    unfit = EnvUnfit

    def __init__(self, breaker: CircuitBreaker) -> None:
        super().__init__(breaker)
        self._num_broken = 0  # of the first episodes; -1: some episode did not fail so

    @classmethod
    def of(cls, config: FlowConfig) -> EnvFitness:
        breaker = CircuitBreaker(
            max_failure_rate=config.env_max_failure_rate,
            window=config.env_failure_window,
            pause_s=config.env_pause_s,
            counted="episodes",
            key="env.max_failure_rate",
        )
        return cls(breaker)

    def episode_ended(self, result: object) -> None:
        """Count an ended episode: a Failed, or anything else. Raises EnvUnfit when the gate closes for good, and
        ConfigError for an environment that never worked.
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
        self.record(result)
