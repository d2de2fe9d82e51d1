"""The alarms on judges: one that fails too often, cascades whose cheap judge is wrong where it is sure, criteria of
rubrics that tell nothing apart or contradict each other.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from grmpipe.config.judge import JudgeConfig
from grmpipe.judge.composition.cascade_counts import CascadeCounts, alarm_text, exceeds, is_known
from grmpipe.judge.protocols.rubric_counts import RubricCounts
from grmpipe.pipeline.counters import JudgeCounts
from grmpipe.pipeline.health import VERDICTS_WINDOW
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.types import Metrics


class FailingJudges(RunFeature):
    """Says once that a judge fails, when more than its `max_failure_rate` of its latest verdicts have failed; says it
    again only after the rate was lower. An abstention is no failure: cascades ask another judge then.

    The latest verdicts are those of whole steps, at least VERDICTS_WINDOW if there are as many. A quarter of it is
    enough for an alarm.
    """

    def __init__(self, judges: Mapping[str, JudgeConfig]) -> None:
        self._judges = judges if len(judges) > 1 else {}
        self._recent: dict[str, deque[JudgeCounts]] = {name: deque() for name in self._judges}
        self._ringing: set[str] = set()

    async def after_step(self, end: StepEnd) -> Metrics:
        self.new_alarms = self.check(end.counts.by_judge)
        return self.metrics()

    def check(self, step: Mapping[str, JudgeCounts]) -> list[str]:
        """New alarms, in words. step: the counts of a step, by judge."""
        failing = set()
        for name, recent in self._recent.items():
            recent.append(step.get(name, JudgeCounts()))
            while sum(map(num_verdicts, recent)) - num_verdicts(recent[0]) >= VERDICTS_WINDOW:
                recent.popleft()
            if self._exceeds(name):
                failing.add(name)
        new, self._ringing = failing - self._ringing, failing
        return [self._text(name) for name in sorted(new)]

    def metrics(self) -> Metrics:
        """Whether an alarm is on; empty with a single judge."""
        return {"alarm/failing_judge": float(bool(self._ringing))} if self._judges else {}

    def _latest(self, name: str) -> JudgeCounts:
        return sum(self._recent[name], JudgeCounts())

    def _exceeds(self, name: str) -> bool:
        judge, latest = self._judges[name], self._latest(name)
        seen = num_verdicts(latest)
        return seen >= max(1, VERDICTS_WINDOW // 4) and latest.failed_verdicts > judge.max_failure_rate * seen

    def _text(self, name: str) -> str:
        judge, latest = self._judges[name], self._latest(name)
        seen, failed = num_verdicts(latest), latest.failed_verdicts
        why = ", ".join(f"{count} {cause}" for cause, count in latest.failed.most_common())
        return (
            f"The judge {name} fails: {failed} of its last {seen} verdicts ({failed / seen:.0%}; "
            f"{judge.key}.max_failure_rate={judge.max_failure_rate:g}), its judgements by cause: "
            f"{why or 'none asked'}; the reward goes on without it where it can"
        )


def num_verdicts(counts: JudgeCounts) -> int:
    """The rollouts that a judge was asked about and did not abstain from."""
    return counts.verdicts + counts.failed_verdicts


LATEST_AUDITS = 20  # at least, in the error of a first judge that learns


class CascadeAlarm(RunFeature):
    """Says once that a cheap judge is wrong where it is sure: when the lower 95 % bound of its mean absolute error is
    above its limit. Says it again only after the bound was below.

    Of a first judge that learns only the latest audits count: earlier ones are of versions that judge no more.
    """

    name = "cascades"

    def __init__(self, limits: Mapping[str, float], learning: Collection[str] = ()) -> None:
        """limits: cascade -> `max_error`, in reward units. learning: the cascades whose first judge learns."""
        self._limits = limits
        self._latest: dict[str, list[CascadeCounts]] = {name: [] for name in learning}  # by step
        self._ringing: set[str] = set()
        self._has_checked = False

    async def after_step(self, end: StepEnd) -> Metrics:
        for name, steps in self._latest.items():
            steps.append(end.counts.cascades.get(name, CascadeCounts()))
            while sum(step.audits for step in steps[1:]) >= LATEST_AUDITS:
                del steps[0]
        latest = {name: sum(steps, CascadeCounts()) for name, steps in self._latest.items()}
        self.new_alarms = self.check({**end.pipeline.counters.total.cascades, **latest})
        found = self.metrics()
        for name, counts in latest.items():
            error = {"error": counts.mean_error, "error_se": counts.standard_error, "steps": len(self._latest[name])}
            found |= {f"cascade/{name}/latest_{key}": float(value) for key, value in error.items() if value is not None}
        return found

    def state(self) -> Mapping[str, Any]:
        latest = {name: [asdict(step) for step in steps] for name, steps in self._latest.items()}
        return {"ringing": sorted(self._ringing), "has_checked": self._has_checked, "latest": latest}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._ringing, self._has_checked = set(state.get("ringing", ())), state.get("has_checked", False)
        for name, steps in state.get("latest", {}).items():
            if name in self._latest:
                self._latest[name] = [CascadeCounts(**step) for step in steps]

    def check(self, counts: Mapping[str, CascadeCounts]) -> list[str]:
        """New alarms, in words. counts: by cascade, the whole run's or the latest."""
        self._has_checked |= any(name in self._limits and is_known(one) for name, one in counts.items())
        exceeded = {name for name, one in counts.items() if exceeds(one, self._limits.get(name, math.inf))}
        new, self._ringing = exceeded - self._ringing, exceeded
        return [alarm_text(name, counts[name], self._limits[name]) for name in sorted(new)]

    def metrics(self) -> Metrics:
        """Whether the alarm is on; empty as long as no cascade has enough audits to know its error."""
        return {"alarm/cascade": float(bool(self._ringing))} if self._has_checked else {}


DEAD_STEPS = 50


class RubricAlarm(RunFeature):
    """Says once of a criterion for all prompts that it is dead: all siblings have met it for DEAD_STEPS steps; and once
    of two that they were never met together, or by the same responses.
    """

    name = "rubric"

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}  # criterion -> the latest steps in which all met it
        self._said: set[str] = set()  # criteria and pairs

    async def after_step(self, end: StepEnd) -> Metrics:
        self.new_alarms = self.check(end.counts.judging.rubric, end.pipeline.counters.total.judging.rubric)
        return self.metrics()

    def state(self) -> Mapping[str, Any]:
        return {"steps": self._steps, "said": sorted(self._said)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._steps, self._said = dict(state.get("steps", {})), set(state.get("said", ()))

    def check(self, step: RubricCounts, total: RubricCounts) -> list[str]:
        """New alarms, in words. A step in which nobody judged a criterion changes nothing."""
        passed = set(step.list_passed())
        for name in step.by_name:
            self._steps[name] = self._steps.get(name, 0) + 1 if name in passed else 0
        found = {
            name: f'The criterion "{name}" is dead: all siblings have met it for {DEAD_STEPS} steps, so that it adds '
            "the same to each reward"
            for name in self._list_dead()
        }
        found |= {pair: f"The criteria {pair} {words}" for pair, words in total.find_contradictions().items()}
        new = [words for name, words in found.items() if name not in self._said]
        self._said = {name for name in self._said if name not in self._steps} | found.keys()
        return new

    def metrics(self) -> Metrics:
        """How many criteria are dead; empty without criteria for all prompts."""
        return {"judge/dead_criteria": float(len(self._list_dead()))} if self._steps else {}

    def _list_dead(self) -> list[str]:
        return [name for name, steps in self._steps.items() if steps >= DEAD_STEPS]
