"""The alarm on cascades whose cheap judge is wrong where it is sure."""

import math
from collections.abc import Mapping
from typing import Any

from grmpipe.judge.composition.cascade_counts import CascadeCounts, alarm_text, exceeds, is_known
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.types import Metrics


class CascadeAlarm(RunFeature):
    """Says once that a cheap judge is wrong where it is sure: when the lower 95 % bound of its mean absolute error is
    above its limit. Says it again only after the bound was below.
    """

    name = "cascades"

    def __init__(self, limits: Mapping[str, float]) -> None:
        """limits: cascade -> `max_error`, in reward units."""
        self._limits = limits
        self._ringing: set[str] = set()
        self._has_checked = False

    async def after_step(self, end: StepEnd) -> Metrics:
        self.new_alarms = self.check(end.pipeline.counters.total.cascades)
        return self.metrics()

    def state(self) -> Mapping[str, Any]:
        return {"ringing": sorted(self._ringing), "has_checked": self._has_checked}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._ringing, self._has_checked = set(state.get("ringing", ())), state.get("has_checked", False)

    def check(self, counts: Mapping[str, CascadeCounts]) -> list[str]:
        """New alarms, in words. counts: of the whole run, by cascade."""
        self._has_checked |= any(name in self._limits and is_known(one) for name, one in counts.items())
        exceeded = {name for name, one in counts.items() if exceeds(one, self._limits.get(name, math.inf))}
        new, self._ringing = exceeded - self._ringing, exceeded
        return [alarm_text(name, counts[name], self._limits[name]) for name in sorted(new)]

    def metrics(self) -> Metrics:
        """Whether the alarm is on; empty as long as no cascade has enough audits to know its error."""
        return {"alarm/cascade": float(bool(self._ringing))} if self._has_checked else {}
