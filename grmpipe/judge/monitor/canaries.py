"""Canaries: fixed responses, judged repeatedly under the same seeds, to see whether the judge drifts. Opens no file."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grmpipe.judge.pointwise_adapter import judge_together
from grmpipe.types import Judge, Metrics, Prompt, Verdict

SURE = 3.0  # standard errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Responses to one prompt that are judged together, with the score that each got first; None: no verdict."""

    prompt: Prompt
    texts: tuple[str, ...]
    scores: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryDrift:
    """Scores now minus the first ones, over responses that got both."""

    differences: tuple[float, ...]
    num_failed: int
    score: float  # the mean now; NaN if none got a verdict

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences) if self.differences else 0.0

    @property
    def is_sure(self) -> bool:
        """Whether the drift exceeds the sampling noise. The same weights and seeds differ only by rounding, in both
        directions.
        """
        if len(self.differences) < 2:
            return False
        error = statistics.stdev(self.differences) / math.sqrt(len(self.differences))
        return abs(self.mean) > SURE * error

    def metrics(self) -> Metrics:
        metrics = {"judge_monitor/canaries_failed": float(self.num_failed)}
        if self.differences:
            metrics |= {
                "judge_monitor/canary_score": self.score,
                "judge_monitor/canary_drift": self.mean,
                "judge_monitor/canary_drift_abs": statistics.fmean(map(abs, self.differences)),
            }
        return metrics


async def judge_canaries(judge: Judge, canaries: Sequence[Canary]) -> list[tuple[float | None, ...]]:
    """The scores of each canary's texts, sampled under names that never change."""
    judged = await asyncio.gather(
        *(judge_together(judge, canary.prompt, f"canary-{i}", canary.texts) for i, canary in enumerate(canaries))
    )
    return [
        tuple(report.verdict.score if isinstance(report.verdict, Verdict) else None for report in reports)
        for reports in judged
    ]


def with_first_scores(canaries: Sequence[Canary], scores: Sequence[tuple[float | None, ...]]) -> tuple[Canary, ...]:
    return tuple(replace(canary, scores=given) for canary, given in zip(canaries, scores, strict=True))


def drift_of(canaries: Sequence[Canary], scores: Sequence[tuple[float | None, ...]]) -> CanaryDrift:
    pairs = [
        (first, now)
        for canary, given in zip(canaries, scores, strict=True)
        for first, now in zip(canary.scores, given, strict=True)
    ]
    both = [(first, now) for first, now in pairs if first is not None and now is not None]
    return CanaryDrift(
        differences=tuple(now - first for first, now in both),
        num_failed=len(pairs) - len(both),
        score=statistics.fmean(now for _, now in both) if both else math.nan,
    )
