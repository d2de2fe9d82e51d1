"""Verdicts made of scores and of other verdicts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from grmpipe.judge.scale import Scale
from grmpipe.judge.vote import Vote, agreement
from grmpipe.types import Cause, Failed, RewardSpan, Rollout, Verdict

COMPONENT = "generative"  # what a GRM's reward is called in a breakdown


def outcome_place(rollout: Rollout) -> RewardSpan:
    """Where one reward for the whole rollout goes: over the last turn's completion. Its value is 0."""
    num_tokens = len(rollout.turns[-1].completion.token_ids)
    return RewardSpan(turn=len(rollout.turns) - 1, start=0, end=num_tokens, value=0.0)


def outcome(rollout: Rollout, value: float) -> tuple[RewardSpan, ...]:
    """One reward for the whole rollout."""
    return (replace(outcome_place(rollout), value=value),)


def unasked(cause: Cause, detail: str) -> Failed:
    """Nothing was sent: 0 attempts."""
    return Failed(stage="judge", cause=cause, attempts=0, detail=detail)


def all_failed(failures: Sequence[Failed]) -> Failed:
    """The verdict where no judgement is of use: by the last cause."""
    attempts = sum(failure.attempts > 0 for failure in failures)
    return Failed(stage="judge", cause=failures[-1].cause, attempts=attempts, detail=failures[-1].detail)


def voted(name: str, rollout: Rollout, scores: Sequence[float], vote: Vote, scale: Scale) -> Verdict:
    """The verdict of a judge called `name`, over the scores of the judgements that counted (at least one)."""
    score = vote(scores)
    reward = scale.reward_of(score)
    return Verdict(
        rewards=outcome(rollout, reward),
        score=score,
        breakdown={name: reward},
        agreement=agreement(scores),
        num_judgements=len(scores),
    )


def mixed(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> Verdict:
    """The weighted mean of components, weights normalised to sum 1. Spans over the same tokens are added up."""
    total = math.fsum(weights[name] for name in verdicts)
    shares = {name: weights[name] / total for name in verdicts}
    return Verdict(
        rewards=added(
            RewardSpan(turn=span.turn, start=span.start, end=span.end, value=shares[name] * span.value)
            for name, verdict in verdicts.items()
            for span in verdict.rewards
        ),
        score=math.fsum(shares[name] * verdict.score for name, verdict in verdicts.items()),
        breakdown={name: verdict.outcome for name, verdict in verdicts.items()},
        agreement=math.fsum(shares[name] * verdict.agreement for name, verdict in verdicts.items()),
        num_judgements=sum(verdict.num_judgements for verdict in verdicts.values()),
    )


def added(spans: Iterable[RewardSpan]) -> tuple[RewardSpan, ...]:
    values: dict[tuple[int, int, int], float] = {}
    for span in spans:
        place = (span.turn, span.start, span.end)
        values[place] = values.get(place, 0.0) + span.value
    return tuple(RewardSpan(turn=turn, start=start, end=end, value=v) for (turn, start, end), v in values.items())
