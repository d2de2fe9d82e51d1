"""From a judged group to training samples: which tokens are trained, and what each is worth. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grmpipe.train.advantages import group_advantages
from grmpipe.train.settings import AlgorithmConfig
from grmpipe.types import BatchTotals, JudgedGroup, Rollout, TrainingSample, Turn, Verdict
from models.types import VersionSpan


def to_samples(group: JudgedGroup, algorithm: AlgorithmConfig) -> tuple[TrainingSample, ...]:
    """One sample or more for each sibling that has a verdict. A failed sibling has none and counts nowhere.

    Raises ValueError for a group with fewer than two verdicts.
    """
    judged = [
        (rollout, verdict.outcome)
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
        if isinstance(verdict, Verdict)
    ]
    advantages = group_advantages({rollout.sibling: outcome for rollout, outcome in judged}, algorithm)
    return tuple(sample for rollout, _ in judged for sample in split_rollout(rollout, advantages[rollout.sibling]))


def split_rollout(rollout: Rollout, advantage: float) -> tuple[TrainingSample, ...]:
    """A sample per segment; every sampled token gets the rollout's advantage."""
    return tuple(_sample(rollout, segment, turns, advantage) for segment, turns in enumerate(_segments(rollout.turns)))


def count(samples: Sequence[TrainingSample], oldest_version: int) -> BatchTotals:
    """The sizes of a batch. A sample without a trained token is no sequence."""
    trained = [sum(sample.loss_mask[1:]) for sample in samples]  # nothing predicts a first token
    return BatchTotals(
        num_loss_tokens=sum(trained),
        num_sequences=sum(tokens > 0 for tokens in trained),
        num_groups=len({sample.group_id for sample in samples}),
        oldest_version=oldest_version,
    )


def _segments(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Turns that can be trained as one sequence: each prompt goes on where the turn before it ended.

    A chat template that rewrites history (drops reasoning, say) breaks the chain: such a turn was sampled after other
    tokens than the ones before it, and starts a segment of its own.
    """
    segments: list[list[Turn]] = []
    so_far: tuple[int, ...] = ()
    for turn in turns:
        if segments and turn.prompt_ids[: len(so_far)] == so_far:
            segments[-1].append(turn)
        else:
            segments.append([turn])
        so_far = turn.prompt_ids + turn.completion.token_ids
    return segments


def _sample(rollout: Rollout, segment: int, turns: Sequence[Turn], advantage: float) -> TrainingSample:
    token_ids: tuple[int, ...] = ()
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    for turn in turns:
        start, sampled = len(turn.prompt_ids), turn.completion
        mask += [0] * (start - len(token_ids)) + [1] * len(sampled.token_ids)
        logprobs += [0.0] * (start - len(token_ids)) + list(sampled.logprobs)
        versions += [
            VersionSpan(model=span.model, version=span.version, start=start + span.start, end=start + span.end)
            for span in sampled.versions
        ]
        token_ids = turn.prompt_ids + sampled.token_ids
    return TrainingSample(
        group_id=rollout.group_id,
        sibling=rollout.sibling,
        segment=segment,
        token_ids=token_ids,
        loss_mask=tuple(mask),
        sampler_logprobs=tuple(logprobs),
        advantages=tuple(advantage * trained for trained in mask),
        versions=tuple(versions),
    )
