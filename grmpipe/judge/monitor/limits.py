"""Limits on metrics: which are exceeded, in words. Pure."""

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

    def __init__(
        self,
        limits: Mapping[str, LimitConfig],
        exceeded: Iterable[str] = (),
        read_before: Iterable[str] = (),
        defaults: Mapping[str, LimitConfig] | None = None,
    ) -> None:
        """exceeded, read_before: names of the limits exceeded before a resume, and of those whose metric was there.

        defaults: limits of other names and metrics than `limits`, which nobody asked for: not missed if never read.
        """
        metrics = {limit.metric for limit in limits.values()}
        others = {name: limit for name, limit in (defaults or {}).items() if limit.metric not in metrics}
        self._asked_for = frozenset(limits)
        self._limits = {**others, **limits}
        self._exceeded = set(exceeded) & self._limits.keys()
        self._never_read = set(self._limits) - set(read_before)
        self._known: set[str] = set()

    def read(self, step: int, metrics: Metrics) -> list[Exceeded]:
        """The limits that this step's metrics exceed."""
        self._known |= metrics.keys()
        found = []
        for name, limit in self._limits.items():
            if (value := metrics.get(limit.metric)) is None:
                continue
            self._never_read.discard(name)
            if (breach := check_limit(limit, value)) is None:
                self._exceeded.discard(name)
                continue
            text = f"judge_monitor.limits.{name}: at step {step} {limit.metric} is {value:.4g}, {breach}"
            found.append(Exceeded(name=name, action=limit.action, text=text, new=name not in self._exceeded))
            self._exceeded.add(name)
        return found

    def metrics(self) -> Metrics:
        """Whether each limit is exceeded; a limit whose metric was never there has no alarm."""
        return {f"alarm/{name}": float(name in self._exceeded) for name in self._limits if name not in self._never_read}

    def never_read(self, *, checks: bool, why_unchecked: str = "") -> list[str]:
        """A sentence on each limit whose metric no step had.

        checks: whether canaries and adversarial replies are switched on; why_unchecked: why there were none.
        """
        return [
            self._why_unread(name, why_unchecked)
            for name in sorted(self._never_read & self._asked_for)
            if checks or not is_of_check(self._limits[name].metric)
        ]

    def _why_unread(self, name: str, why_unchecked: str) -> str:
        metric = self._limits[name].metric
        text = f"judge_monitor.limits.{name}: no step reported the metric {metric}"
        if why_unchecked and is_of_check(metric):
            return f"{text}: {why_unchecked}"
        near = difflib.get_close_matches(metric, sorted(self._known), n=1)
        return f"{text}; did you mean {near[0]}?" if near else text


def is_of_check(metric: str) -> bool:
    """Whether only the checks with canaries and adversarial replies report it, in total or by judge."""
    area, _, name = metric.rpartition("/")
    return area.split("/")[0] == "judge_monitor" and name in OF_CHECKS


def check_limit(limit: LimitConfig, value: float) -> str | None:
    if limit.above is not None and value > limit.above:
        return f"above {limit.above:g}"
    if limit.below is not None and value < limit.below:
        return f"below {limit.below:g}"
    return None
