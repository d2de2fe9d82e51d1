"""What a run took and came to, resumes included: time by role, and the summary. It changes nothing."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

from grmpipe.observe.summary import EvalSummary, GroupsSummary, JudgingSummary, Status, Summary
from grmpipe.pipeline import Pipeline
from grmpipe.types import Metrics


class Accounts:
    """`grm` is the judge's model by name, or None where a rule judges."""

    def __init__(self, grm: str | None) -> None:
        self.learner_busy_s = 0.0
        self._grm = grm
        self._began_s = time.monotonic()
        self._wall_before_s = 0.0
        self._busy_before_s: Mapping[str, float] = {}

    @property
    def since_start_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def wall_s(self) -> float:
        return round(self._wall_before_s + self.since_start_s, 3)

    def restore(self, wall_s: float, busy_s: Mapping[str, float]) -> None:
        self._wall_before_s, self._busy_before_s = wall_s, busy_s

    def busy_s(self, pipeline: Pipeline | None) -> dict[str, float]:
        """By role: seconds with at least one training request in flight; of the learner, seconds in its calls."""
        busy: defaultdict[str, float] = defaultdict(float, self._busy_before_s)
        busy["learner"] += self.learner_busy_s
        if pipeline is not None:
            busy["policy"] += pipeline.playing.meter.busy_s
            if self._grm is not None:
                busy[self._grm] += pipeline.judging.meter.busy_s
        return {role: round(seconds, 3) for role, seconds in busy.items()}

    def summary(
        self,
        status: Status,
        failure: str | None,
        pipeline: Pipeline | None,
        eval_initial: Metrics,
        eval_final: Metrics,
        alarms: tuple[str, ...],
    ) -> Summary:
        version = pipeline.version if pipeline else 0
        return Summary(
            status=status,
            steps=version,
            versions={"policy": version} | ({self._grm: 0} if self._grm else {}),
            wall_s=self.wall_s,
            eval=EvalSummary(initial=eval_initial, final=eval_final),
            busy_s=self.busy_s(pipeline),
            judging=judging(pipeline) if pipeline else JudgingSummary(),
            groups=groups(pipeline) if pipeline else GroupsSummary(),
            max_staleness_trained=pipeline.max_staleness_trained if pipeline else 0,
            alarms=alarms,
            failure=failure,
        )


def judging(pipeline: Pipeline) -> JudgingSummary:
    total = pipeline.tally.total_so_far()
    return JudgingSummary(asked=total.asked, counted=total.counted, failed=total.failed, tokens=total.judge_tokens)


def groups(pipeline: Pipeline) -> GroupsSummary:
    ledger = pipeline.admission
    return GroupsSummary(
        submitted=ledger.submitted, trained=ledger.trained, dropped=ledger.dropped, in_flight=len(ledger.in_flight)
    )
