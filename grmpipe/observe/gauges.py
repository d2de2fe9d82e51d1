"""The metrics that the console shows, and their formats. Pure: draws nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grmpipe.types import Metrics

FAILED_PREFIX = "judge/failed_"  # then the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A shown metric. `brief`: its name in a line per step; `title`: in the panel. `width`: of the value, so that lines
    align.
    """

    metric: str
    title: str
    brief: str
    decimals: int
    width: int
    unit: str = ""

    def text(self, metrics: Metrics) -> str:
        value = metrics.get(self.metric, math.nan)
        shown = f"{value:,.{self.decimals}f}{self.unit}" if math.isfinite(value) else "-"
        return shown.rjust(self.width)


ACCURACY = Gauge(metric="train/true_accuracy", title="true accuracy", brief="true", decimals=2, width=4)
SCORE = Gauge(metric="train/grm_score", title="GRM score", brief="score", decimals=1, width=4)
PACE = (
    Gauge(metric="time/step_s", title="step", brief="took", decimals=1, width=6, unit="s"),
    Gauge(metric="rollout/tokens_per_s", title="policy tokens/s", brief="tok/s", decimals=0, width=7),
    Gauge(metric="judge/tokens_per_s", title="GRM tokens/s", brief="grm tok/s", decimals=0, width=7),
    Gauge(metric="staleness/max", title="staleness, oldest", brief="stale", decimals=0, width=2),
)
WAITS = (
    Gauge(metric="time/train_s", title="learner worked", brief="learner works", decimals=1, width=6, unit="s"),
    Gauge(
        metric="stall/groups_s", title="learner waited for groups", brief="learner waits",
        decimals=1, width=6, unit="s",
    ),
    Gauge(
        metric="stall/engines_idle_s", title="engines waited for learner", brief="engines wait",
        decimals=1, width=6, unit="s",
    ),
    Gauge(metric="sync/push_s", title="weight sync", brief="sync", decimals=2, width=6, unit="s"),
)  # fmt: skip
HELD_OUT = (
    Gauge(metric="eval/true_accuracy", title="true accuracy", brief="true", decimals=2, width=4),
    Gauge(metric="eval/true_accuracy_greedy", title="greedy", brief="greedy", decimals=2, width=4),
    Gauge(metric="eval/grm_score", title="GRM score", brief="score", decimals=1, width=4),
)
LINE = (PACE[0], ACCURACY, SCORE, PACE[1], PACE[3], *WAITS[1:])  # of a step, without a panel


def failures_by_cause(metrics: Metrics) -> dict[str, int]:
    """Failed judgements of this step by cause, without causes that did not occur."""
    found = {
        name.removeprefix(FAILED_PREFIX): value for name, value in metrics.items() if name.startswith(FAILED_PREFIX)
    }
    return {cause: int(value) for cause, value in sorted(found.items()) if value > 0}


def failures_text(failures: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in failures.items()) or "none"


def step_lines(step: int, num_steps: int, metrics: Metrics) -> Iterator[str]:
    """The lines of a step without a panel: one for its batch, one for an evaluation on held-out prompts. Empty if it
    has neither.
    """
    place = f"step {step:>{len(str(num_steps))}}/{num_steps}"
    if any(gauge.metric in metrics for gauge in LINE):
        # Failures come last: their text has no fixed width.
        yield "  ".join([place, *written(LINE, metrics), f"failed {failures_text(failures_by_cause(metrics))}"])
    if any(gauge.metric in metrics for gauge in HELD_OUT):
        yield "  ".join([place, "held-out:", *written(HELD_OUT, metrics)])


def written(gauges: Sequence[Gauge], metrics: Metrics) -> list[str]:
    """The gauges that this run measures: a replay has no engines, prompts may have no reference."""
    return [f"{gauge.brief} {gauge.text(metrics)}" for gauge in gauges if gauge.metric in metrics]
