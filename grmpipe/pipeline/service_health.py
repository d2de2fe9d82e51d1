"""The health of a service (judge, policy, environments): a circuit breaker that pauses its work, then stops the run."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from grmpipe.scheduler.clock import ActiveClock
from grmpipe.types import Cause, Failed

log = logging.getLogger(__name__)

HealthState = Literal["closed", "open", "half-open", "stopped"]


class Unfit(Exception):
    """Too much failed before a pause and after it. No result was made up instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentResult:
    """A result that is remembered. cause: of a failure; None: a success. of: whose failure it is, if known."""

    cause: Cause | None
    of: tuple[str, ...] = ()


SUCCESS = RecentResult(cause=None)


class ServiceHealth:
    """Closed, it lets work through; open, it pauses work; half-open, it lets work through on trial; stopped, it raises.

    It opens by the share of failures in a sliding window, once a quarter of the window is filled. After the pause it is
    half-open, with an empty window: a whole window below the rate closes it, too many failures stop it.

    work:    what pauses, for the log.
    counted: what is counted, in the plural.
    key:     of the configuration, that sets the rate.
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
        self._total = Counter[Cause | None]()  # of all results, those in pauses too
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

        of: of several judges, those whose failure it is.
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
        """Raises Unfit if of all results so far, however few, more than the rate or every one failed."""
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
