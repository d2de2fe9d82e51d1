"""Verdicts made from one score, from failures and from other verdicts. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from grmpipe.types import Cause, Failed, JudgedCriterion, JudgeReport, RewardSpan, Rollout, Verdict

COMPONENT = "generative"  # the name of a GRM's reward in a breakdown


def outcome_place(rollout: Rollout) -> RewardSpan:
    """The span of one reward for the whole rollout: the last turn's completion. Its value is 0."""
    num_tokens = len(rollout.turns[-1].completion.token_ids)
    return RewardSpan(turn=len(rollout.turns) - 1, start=0, end=num_tokens, value=0.0)


def outcome(rollout: Rollout, value: float) -> tuple[RewardSpan, ...]:
    """One reward for the whole rollout."""
    return (replace(outcome_place(rollout), value=value),)


def get_reward(verdict: Verdict | Failed) -> float | None:
    """The reward of the whole rollout. None: the verdict failed, or the run has no rewards."""
    return verdict.outcome if isinstance(verdict, Verdict) and verdict.rewards else None


def get_shown_score(verdict: Verdict | Failed) -> float | None:
    """The score on the judge's scale. None: the verdict failed, or nobody judged."""
    return verdict.score if isinstance(verdict, Verdict) and verdict.rewards else None


def describe_verdict(verdict: Verdict | Failed) -> str:
    """The verdict in a few words."""
    if isinstance(verdict, Failed):
        return f"failed: {verdict.cause}"
    return f"reward {verdict.outcome:.4g}" if verdict.rewards else "no reward"


def describe_criteria(criteria: Iterable[JudgedCriterion]) -> str:
    """The criteria of a rubric by name, each with how far it is met, and what else a reward can't be read without."""

    def describe(one: JudgedCriterion) -> str:
        facts = {"fault": one.fault, "essential: caps the reward": one.caps, "left out": one.left_out}
        marks = ", ".join(words for words, holds in facts.items() if holds)
        return f"{one.name} {'failed' if one.met is None else f'{one.met:.2g}'}{f' ({marks})' if marks else ''}"

    return "criteria: " + "; ".join(map(describe, criteria))


def make_failure(cause: Cause, detail: str, attempts: int = 0) -> Failed:
    """A judgement's failure. attempts: 0 if it was never requested."""
    return Failed(stage="judge", cause=cause, attempts=attempts, detail=detail)


def only_finite(report: JudgeReport) -> JudgeReport:
    """The report, checked: a verdict or judgement with a number that isn't finite becomes a failure, `unparseable`."""
    checked = report
    if (broken := [one for one in report.judgements if not all(map(math.isfinite, one.scores))]) != []:
        failures = tuple(_not_finite(f"scores {one.scores}", 1) for one in broken)
        sound = tuple(one for one in report.judgements if one not in broken)
        checked = replace(checked, judgements=sound, failures=(*report.failures, *failures))
    verdict = report.verdict
    if isinstance(verdict, Verdict) and not all(map(math.isfinite, _numbers(verdict))):
        spans = ", ".join(f"{span.value:g}" for span in verdict.rewards)
        words = f"score {verdict.score:g}, rewards {spans}, score std {verdict.score_std:g}"
        checked = replace(checked, verdict=_not_finite(words, max(1, verdict.num_judgements)), audit=None)
    return checked


def _numbers(verdict: Verdict) -> Iterable[float]:
    yield from (verdict.score, verdict.score_std, *verdict.breakdown.values())
    yield from (span.value for span in (*verdict.rewards, *verdict.normalised))


def _not_finite(words: str, attempts: int) -> Failed:
    return make_failure("unparseable", f"the judge returned a number that isn't finite: {words}", attempts)


def all_failed(failures: Sequence[Failed]) -> Failed:
    """The failed verdict of a rollout without a usable judgement: it has the last cause."""
    attempts = sum(failure.attempts > 0 for failure in failures)
    return make_failure(failures[-1].cause, failures[-1].detail, attempts)


def report_failures(*failures: Failed) -> JudgeReport:
    """The report on a rollout without a usable judgement."""
    return JudgeReport(verdict=all_failed(failures), failures=failures)


def report_score(rewards: tuple[RewardSpan, ...], score: float, breakdown: Mapping[str, float]) -> JudgeReport:
    """The report of a judge that gives one number, without a vote."""
    return JudgeReport(
        verdict=Verdict(rewards=rewards, score=score, breakdown=breakdown, score_std=0.0, num_judgements=1)
    )


def mix_verdicts(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> Verdict:
    """The weighted mean of components, weights normalised to sum 1. Spans over the same tokens are added up.

    If one component is a mean of steps, the spans of the others share their component's weight in the mixture.
    """
    total = math.fsum(weights[name] for name in verdicts)
    shares = {name: weights[name] / total for name in verdicts}
    has_shares = any(span.share is not None for verdict in verdicts.values() for span in verdict.rewards)
    return Verdict(
        rewards=sum_spans(
            replace(
                span,
                value=shares[name] * span.value,
                share=shares[name] * (1 / len(verdict.rewards) if span.share is None else span.share)
                if has_shares
                else None,
            )
            for name, verdict in verdicts.items()
            for span in verdict.rewards
        ),
        score=math.fsum(shares[name] * verdict.score for name, verdict in verdicts.items()),
        breakdown={name: verdict.outcome for name, verdict in verdicts.items()},
        score_std=math.fsum(shares[name] * verdict.score_std for name, verdict in verdicts.items()),
        num_judgements=sum(verdict.num_judgements for verdict in verdicts.values()),
    )


def sum_spans(spans: Iterable[RewardSpan]) -> tuple[RewardSpan, ...]:
    by_place: dict[tuple[int, int, int], RewardSpan] = {}
    for span in spans:
        place = (span.turn, span.start, span.end)
        if (before := by_place.get(place)) is not None:
            share = None if span.share is None else span.share + (before.share or 0.0)
            span = replace(span, value=before.value + span.value, share=share)
        by_place[place] = span
    return tuple(by_place.values())
