"""Canaries: fixed responses, judged repeatedly under the same seeds, to see whether the judge drifts."""

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from grmpipe.judge.pointwise_adapter import judge_group, rollout_of_messages, rollout_of_text
from grmpipe.models.types import Message
from grmpipe.types import Judge, JudgeReport, Metrics, Prompt, Rollout, Verdict

SURE = 3.0  # standard errors
Scores = tuple[float | None, ...]  # one per text of a canary, in their order; None: no verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Responses to one prompt that are judged together, with the scores that they got first.

    by_judge: the scores that each judge gave first, where there are several.
    episode:  instead of texts: the roles and contents of an episode's messages after the prompt.
    wrong:    whether its only text is labelled as wrong: an adversarial reply.
    """

    prompt: Prompt
    texts: tuple[str, ...] = ()
    episode: tuple[tuple[str, str], ...] = ()
    scores: Scores = ()
    by_judge: Mapping[str, Scores] = field(default_factory=dict)
    wrong: bool = False

    def rollouts(self, group_id: str) -> list[Rollout]:
        """The responses, as siblings of a group."""
        if self.episode:
            messages = [Message(role=role, content=content) for role, content in self.episode]
            return [rollout_of_messages(group_id, 0, messages)]
        return [rollout_of_text(group_id, i, text) for i, text in enumerate(self.texts)]

    def get_scores(self, judge: str) -> Scores:
        """The first scores by a judge; under no name, those that make the reward."""
        return self.by_judge.get(judge, ()) if judge else self.scores


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

    def metrics(self, judge: str = "") -> Metrics:
        """judge: of several, the one whose scores they are."""
        area = f"judge_monitor/{judge}" if judge else "judge_monitor"
        metrics = {f"{area}/canaries_failed": float(self.num_failed)}
        if self.differences:
            metrics |= {
                f"{area}/canary_score": self.score,
                f"{area}/canary_drift": self.mean,
                f"{area}/canary_drift_abs": statistics.fmean(map(abs, self.differences)),
            }
        return metrics


CanaryScores = Mapping[str, Sequence[Scores]]  # each canary's, by the judges' names; the reward's under no name


def with_first(canaries: Sequence[Canary], found: CanaryScores) -> tuple[Canary, ...]:
    """The canaries with these scores as their first ones."""
    return tuple(
        replace(canary, scores=found[""][i], by_judge={judge: own[i] for judge, own in found.items() if judge})
        for i, canary in enumerate(canaries)
    )


def drifts(canaries: Sequence[Canary], found: CanaryScores) -> dict[str, CanaryDrift]:
    """Judge -> its drift. A judge that wasn't there at first has none."""
    firsts = {judge: [canary.get_scores(judge) for canary in canaries] for judge in found}
    return {judge: measure_drift(firsts[judge], own) for judge, own in found.items() if all(firsts[judge])}


async def judge_canaries(judge: Judge, members: Mapping[str, Judge], canaries: Sequence[Canary]) -> CanaryScores:
    """Scores sampled under names that never change.

    members: the judges by name, where there are several. Those that the composition didn't ask are asked as well: what
    a cascade or a gate leaves out would hide their drift.
    """
    judged = await asyncio.gather(
        *(judge_canary(judge, members, f"canary-{i}", canary) for i, canary in enumerate(canaries))
    )
    return {name: [scores[name] for scores in judged] for name in ("", *members)}


async def judge_canary(judge: Judge, members: Mapping[str, Judge], group_id: str, canary: Canary) -> dict[str, Scores]:
    rollouts = canary.rollouts(group_id)
    reports = await judge_group(judge, canary.prompt, rollouts)
    by_judge = {"": reports}
    for name, member in members.items():
        if all(name in report.by_judge for report in reports):
            by_judge[name] = tuple(report.by_judge[name] for report in reports)
        else:
            by_judge[name] = await judge_group(member, canary.prompt, rollouts)
    return {name: read_scores(own) for name, own in by_judge.items()}


def read_scores(reports: Sequence[JudgeReport]) -> Scores:
    return tuple(report.verdict.score if isinstance(report.verdict, Verdict) else None for report in reports)


def measure_drift(firsts: Sequence[Scores], scores: Sequence[Scores]) -> CanaryDrift:
    """The drift from the first scores of each canary to those of now."""
    pairs = [
        (first, now)
        for before, given in zip(firsts, scores, strict=True)
        for first, now in zip(before, given, strict=True)
    ]
    both = [(first, now) for first, now in pairs if first is not None and now is not None]
    return CanaryDrift(
        differences=tuple(now - first for first, now in both),
        num_failed=len(pairs) - len(both),
        score=statistics.fmean(now for _, now in both) if both else math.nan,
    )
