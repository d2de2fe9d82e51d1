"""Limits on metrics: which are exceeded, in words. Pure; pauses and stops nothing itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grmpipe.config.judge_monitor import LimitConfig
from grmpipe.types import Metrics

OF_CHECKS = (
    "attack_success_share", "adversarial_score", "adversarial_failed_share", "canary_score", "canary_drift",
    "canary_drift_abs", "canaries_failed",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Exceeded:
    """A limit that a step's metrics exceed. `new`: whether they did not at the last reading."""

    name: str
    action: str
    text: str
    new: bool


class Limits:
    """Compares every step's metrics with their limits. A metric that a step lacks leaves its limit as it was."""

    def __init__(self, limits: Mapping[str, LimitConfig], exceeded: Iterable[str] = ()) -> None:
        """`exceeded`: names of the limits exceeded before a resume."""
        self._limits = dict(limits)
        self._exceeded = set(exceeded) & self._limits.keys()
        self._never_read = set(self._limits)
        self._known: set[str] = set()

    def read(self, step: int, metrics: Metrics) -> list[Exceeded]:
        """The limits that this step's metrics exceed."""
        self._known |= metrics.keys()
        found = []
        for name, limit in self._limits.items():
            if (value := metrics.get(limit.metric)) is None:
                continue
            self._never_read.discard(name)
            if (breach := broken(limit, value)) is None:
                self._exceeded.discard(name)
                continue
            text = f"judge_monitor.limits.{name}: at step {step} {limit.metric} is {value:.4g}, {breach}"
            found.append(Exceeded(name=name, action=limit.action, text=text, new=name not in self._exceeded))
            self._exceeded.add(name)
        return found

    def metrics(self) -> Metrics:
        return {f"alarm/{name}": float(name in self._exceeded) for name in self._limits}

    def never_read(self) -> list[str]:
        """A sentence on the limits whose metric no step had, except those of checks that may be switched off."""
        messages = []
        for name in sorted(self._never_read):
            metric = self._limits[name].metric
            if is_of_check(metric):
                continue
            near = difflib.get_close_matches(metric, sorted(self._known), n=1)
            messages.append(
                f"judge_monitor.limits.{name}: no step reported the metric {metric}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        return messages


def is_of_check(metric: str) -> bool:
    """Whether only the checks with canaries and adversarial replies report it, in total or by judge."""
    area, _, name = metric.rpartition("/")
    return area.split("/")[0] == "judge_monitor" and name in OF_CHECKS


def broken(limit: LimitConfig, value: float) -> str | None:
    if limit.above is not None and value > limit.above:
        return f"above {limit.above:g}"
    if limit.below is not None and value < limit.below:
        return f"below {limit.below:g}"
    return None
