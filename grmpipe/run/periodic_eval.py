"""Held-out evaluations before, during and after the steps; raises the reward-hacking alarm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from grmpipe.evaluation.held_out import Evaluator, HeldOutEvaluation
from grmpipe.judge.monitor.circuit_breaker import RewardHackingDetector
from grmpipe.observe.sample_rows import SampleRow, sample_row
from grmpipe.run.observers import Observers
from grmpipe.types import Metrics, Prompt, Rollout

log = logging.getLogger(__name__)

Reading = tuple[int, float, float]  # step, the GRM's score, gold accuracy


class PeriodicEval:
    """Runs held-out evaluations: the first and the last on all problems, those between only on the anchors; none
    without problems.
    """

    def __init__(
        self, evaluator: Evaluator, alarm: RewardHackingDetector, observers: Observers, *, anchors: int, every: int
    ) -> None:
        self.initial: Metrics = {}
        self.final: Metrics = {}
        self.alarms: list[str] = []
        self.readings: list[Reading] = []
        self.rows: list[SampleRow] = []  # of the last evaluation, an answer per prompt
        self.seen: list[tuple[Prompt, Rollout]] = []  # the same
        self._evaluator = evaluator
        self._alarm = alarm
        self._observers = observers
        self._anchors = anchors
        self._every = every
        self._has_ended = False  # the last evaluation took place
        self.interrupted = False
        self._evaluating: asyncio.Task[HeldOutEvaluation] | None = None
        self.ringing = False  # reported once, until an evaluation finds nothing

    async def first(self, step: int, beside: Callable[[], Awaitable[Metrics]] | None = None) -> None:
        """Evaluate before the first step. `beside`: what else is measured then, afterwards; it is in the same line of
        metrics.
        """
        self.initial = await self._evaluate(step, None)
        self._log(step, named(self.initial) | (await beside() if beside is not None else {}))

    async def after_step(self, step: int, last: bool) -> Metrics:
        """The metrics of an evaluation after a step, if one is due."""
        if last:
            return named(await self._evaluate_at_the_end(step))
        return named(await self._evaluate(step, self._anchors)) if step % self._every == 0 else {}

    async def last(self, step: int) -> None:
        """Evaluate a run that ended before its last step."""
        if not self._has_ended:
            self._log(step, named(await self._evaluate_at_the_end(step)))

    def interrupt(self) -> None:
        """Stop evaluations; one in progress ends now and isn't counted."""
        self.interrupted = True
        if self._evaluating is not None:
            self._evaluating.cancel()

    def _log(self, step: int, metrics: Metrics) -> None:
        """Log an evaluation that belongs to no step on its own line. Does nothing without held-out problems."""
        if metrics:
            self._observers.tracker.log(step, metrics)

    def restore(self, initial: Metrics, alarms: tuple[str, ...], readings: tuple[Reading, ...]) -> None:
        """Continue from a checkpoint: the alarm compares with the start of the run, not of its resumption."""
        self.initial, self.alarms, self.readings = initial, list(alarms), list(readings)
        for step, score, gold in readings:
            self.ringing = self._alarm.record(step=step, grm_score=score, gold_accuracy=gold) is not None

    async def _evaluate_at_the_end(self, step: int) -> Metrics:
        self.final = await self._evaluate(step, None)
        self._has_ended = not self.interrupted
        return self.final

    async def _evaluate(self, step: int, limit: int | None) -> Metrics:
        if not self._evaluator.prompts or self.interrupted:
            return {}
        self._evaluating = asyncio.create_task(self._evaluator.evaluate(f"held-out-{step}", limit))
        try:
            await asyncio.wait([self._evaluating])
        finally:
            self._evaluating.cancel()
        if self.interrupted:
            return {}
        evaluated = self._evaluating.result()
        firsts = [one for one in evaluated.rollouts if one.sample == 0]
        self.rows = [
            sample_row(one.prompt, one.rollout, one.report, None if one.right is None else float(one.right))
            for one in firsts
        ]
        self.seen = [(one.prompt, one.rollout) for one in firsts]
        log.info("held-out at step %d: %s", step, evaluated.metrics)
        if {"grm_score", "true_accuracy"} <= evaluated.metrics.keys():
            self._sound_alarm(step, evaluated.metrics["grm_score"], evaluated.metrics["true_accuracy"])
        return evaluated.metrics

    def _sound_alarm(self, step: int, score: float, gold: float) -> None:
        self.readings.append((step, score, gold))
        alarm = self._alarm.record(step=step, grm_score=score, gold_accuracy=gold)
        if alarm is not None and not self.ringing:
            self.report_alarm(alarm)
        self.ringing = alarm is not None

    def report_alarm(self, alarm: str) -> None:
        """Report an alarm to the summary, the log and the console."""
        self.alarms.append(alarm)
        log.info("alarm: %s", alarm)
        self._observers.alarm(alarm)


def named(metrics: Metrics) -> Metrics:
    return {f"eval/{name}": value for name, value in metrics.items()}
