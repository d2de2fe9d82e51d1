"""Whether the judge is fit: a gate that pauses, then stops the run."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grmpipe.judge.monitor.position_bias import PositionBias, bias_metrics
from grmpipe.types import Cause, Failed, JudgeReport, Metrics
from scheduler.clock import ActiveClock

log = logging.getLogger(__name__)

BreakerState = Literal["open", "paused", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentResult:
    """A result as the breaker remembers it. cause: of a failure; None: a success. of: whose failure it is, if known."""

    cause: Cause | None
    of: tuple[str, ...] = ()


SUCCESS = RecentResult(cause=None)


class CircuitBreaker:
    """A gate that is open, paused, open again, then stopped, by the share of failures in a sliding window.

    The gate acts once a quarter of the window is filled. After the pause it opens with an empty window. It pauses once
    more only after a whole window below the rate; otherwise it stops.

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
        self._state: BreakerState = "open"
        self._paused_until_s = 0.0
        self._warned = False
        self._num_since_opening = 0
        self._cause = ""

    def state(self, now_s: float) -> BreakerState:
        if self._state == "paused" and now_s >= self._paused_until_s:
            self._state = "open"
            self._recent.clear()
            self._num_since_opening = 0
        return self._state

    def seconds_to_pause(self, now_s: float) -> float:
        """Seconds left of the pause; 0 if judging may continue, and 0 if it never will."""
        return self._paused_until_s - now_s if self.state(now_s) == "paused" else 0.0

    def record(self, result: object, now_s: float, of: Sequence[str] = ()) -> None:
        """Count a result: a Failed is a failure, anything else a success. Results during a pause are ignored: their
        work began before it.

        of: of several judges, those whose failure it is.
        """
        if self.state(now_s) != "open":
            return
        self._recent.append(RecentResult(cause=result.cause, of=tuple(of)) if isinstance(result, Failed) else SUCCESS)
        self._num_since_opening += 1
        if isinstance(result, Failed):
            self._last_detail = result.detail
        if self._exceeds():
            self._close(now_s)
        elif self._num_since_opening >= self._window:
            self._warned = False

    def trip(self, cause: str, now_s: float) -> None:
        """Close for a reason other than failures: pause, or stop if there was a pause recently."""
        if self.state(now_s) == "open":
            self._cause = cause + (f", again after a pause of {self._pause_s:g} s" if self._warned else "")
            self._shut(now_s)

    def stop_cause(self) -> str:
        """Why judging paused or stopped, in plain words; empty if it never did."""
        return self._cause

    def _exceeds(self) -> bool:
        num_failed = len(self._recent) - self._recent.count(SUCCESS)
        enough = len(self._recent) >= max(1, self._window // 4)
        return enough and num_failed > self._max_failure_rate * len(self._recent)

    def _close(self, now_s: float) -> None:
        self._cause = self._explain()
        self._shut(now_s)

    def _shut(self, now_s: float) -> None:
        if self._warned:
            self._state = "stopped"
        else:
            self._state, self._warned, self._paused_until_s = "paused", True, now_s + self._pause_s

    def _explain(self) -> str:
        counts = Counter(seen.cause for seen in self._recent if seen.cause is not None)
        num_seen, num_failed = len(self._recent), counts.total()
        causes = ", ".join(f"{count} {cause}" for cause, count in counts.most_common())
        by_judge = Counter(name for seen in self._recent for name in seen.of)
        judges = ", ".join(f"{name} in {count}" for name, count in by_judge.most_common())
        again = f", again after a pause of {self._pause_s:g} s" if self._warned else ""
        return (
            f"{num_failed} of the last {num_seen} {self._counted} failed ({num_failed / num_seen:.0%}; "
            f"{self._key}={self._max_failure_rate:g}){again}: {causes}"
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
