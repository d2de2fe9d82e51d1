"""The judge's numbers of one step. Pure: counts and statistics, no opinion."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import get_args

from grmpipe.types import (
    DataCause,
    Failed,
    FailedJudgement,
    InfraCause,
    JudgedGroup,
    JudgeReport,
    Metrics,
    Rollout,
    Verdict,
)

CAUSES: tuple[str, ...] = (*get_args(InfraCause), *get_args(DataCause))


def judging_metrics(groups: Sequence[JudgedGroup], reports: Sequence[JudgeReport]) -> Metrics:
    """Counts are of `reports`, statistics of `groups`. What isn't defined (the mean of nothing) has no entry."""
    judged = [
        (rollout, verdict)
        for group in groups
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
        if isinstance(verdict, Verdict)
    ]
    return {
        **counts(reports),
        **score_metrics([verdict for _, verdict in judged]),
        **component_metrics([verdict.breakdown for _, verdict in judged]),
        **tie_metrics(groups),
        **length_metrics(judged),
    }


def counts(reports: Sequence[JudgeReport]) -> Metrics:
    """asked = counted + failed, re-asked ones included. Every cause has an entry: a flat line is news too."""
    counted = [judgement for report in reports for judgement in report.judgements]
    failures = [failure for report in reports for failure in report.failures]
    completions = [j.completion for j in counted]
    completions += [failure.completion for failure in failures if isinstance(failure, FailedJudgement)]
    by_cause = {f"judge/num_failed_{cause}": float(sum(f.cause == cause for f in failures)) for cause in CAUSES}
    return {
        "judge/num_asked": float(len(counted) + len(failures)),
        "judge/num_counted": float(len(counted)),
        **by_cause,
        "judge/num_failed_verdicts": float(sum(isinstance(report.verdict, Failed) for report in reports)),
        "judge/num_tokens": float(sum(len(completion.token_ids) for completion in completions)),
    }


def score_metrics(verdicts: Sequence[Verdict]) -> Metrics:
    if not verdicts:
        return {}
    return {
        **spread("judge/score", [verdict.score for verdict in verdicts]),
        "judge/agreement_mean": statistics.fmean(verdict.agreement for verdict in verdicts),
    }


def component_metrics(breakdowns: Sequence[Mapping[str, float]]) -> Metrics:
    """Each component by itself, before weighting."""
    metrics: Metrics = {}
    for name in sorted({name for breakdown in breakdowns for name in breakdown}):
        metrics |= spread(f"judge/{name}_reward", [breakdown[name] for breakdown in breakdowns if name in breakdown])
    return metrics


def spread(name: str, values: Sequence[float]) -> Metrics:
    return {
        f"{name}_mean": statistics.fmean(values),
        f"{name}_std": statistics.pstdev(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


def tie_metrics(groups: Sequence[JudgedGroup]) -> Metrics:
    """The share of groups whose rewards are all equal: they teach nothing."""
    outcomes = [[v.outcome for v in group.verdicts if isinstance(v, Verdict)] for group in groups]
    compared = [values for values in outcomes if len(values) > 1]
    if not compared:
        return {}
    return {"judge/tie_share": statistics.fmean(len(set(values)) == 1 for values in compared)}


def length_metrics(judged: Sequence[tuple[Rollout, Verdict]]) -> Metrics:
    """Pearson's correlation of score and sampled tokens: a judge that pays for length shows here."""
    scores = [verdict.score for _, verdict in judged]
    lengths = [float(rollout.num_sampled_tokens) for rollout, _ in judged]
    if len(set(scores)) < 2 or len(set(lengths)) < 2:
        return {}
    correlation = statistics.correlation(lengths, scores)
    return {"judge/score_length_correlation": correlation} if math.isfinite(correlation) else {}
