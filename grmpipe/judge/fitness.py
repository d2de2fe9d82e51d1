"""Holds judging back while the judge is unfit, and keeps its habits: what comparing by place shows. Judges nothing."""

from __future__ import annotations

import asyncio
import logging

from grmpipe.judge.monitor.failure_gate import FailureGate
from grmpipe.judge.monitor.position_bias import Habits
from grmpipe.types import JudgeReport, Metrics
from scheduler.clock import ActiveClock

log = logging.getLogger(__name__)


class Unfit(Exception):
    """Too much failed, before a pause and after it. Nothing was made up in its place."""


class JudgeUnfit(Unfit):
    """Too many verdicts failed."""


class Fitness:
    """Pauses work while its gate is closed, and raises `unfit` once that is for good."""

    work = ""
    unfit = Unfit

    def __init__(self, gate: FailureGate) -> None:
        self._gate = gate
        self._loop = asyncio.get_running_loop()
        self._told = ""

    def record(self, result: object) -> None:
        """A Failed, or what else there is: a success. Raises `unfit` when the gate closes for good."""
        self._gate.record(result, self._loop.time())
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self._gate.state(self._loop.time()) == "stopped":
            raise self.unfit(self._gate.stop_cause())

    async def until_fit(self, clock: ActiveClock) -> None:
        """Sit out a pause; deadlines stand still meanwhile."""
        while (left_s := self._gate.seconds_to_pause(self._loop.time())) > 0:
            if self._told != self._gate.stop_cause():
                self._told = self._gate.stop_cause()
                log.warning("%s pauses for %.0f s: %s", self.work, left_s, self._told)
            with clock.paused():
                await asyncio.sleep(left_s)


class JudgeFitness(Fitness):
    """Pauses judging above the failure rate, and then stops the run (promise 1)."""

    work = "judging"
    unfit = JudgeUnfit

    def __init__(self, gate: FailureGate) -> None:
        super().__init__(gate)
        self._habits = Habits()

    def verdict(self, report: JudgeReport) -> None:
        """Count a verdict. Raises JudgeUnfit when the gate closes for good."""
        self._habits = self._habits.with_judgements(report.judgements)
        self.record(report.verdict)

    def trip(self, cause: str) -> None:
        """Pause for a cause that no verdict shows. Raises JudgeUnfit if it is one too many."""
        self._gate.trip(cause, self._loop.time())
        self._raise_if_stopped()

    def habits(self) -> Metrics:
        """Since the last time: order flips, ties, wins of the first place. Empty for a judge of single responses."""
        metrics, self._habits = self._habits.metrics(), Habits()
        return metrics
