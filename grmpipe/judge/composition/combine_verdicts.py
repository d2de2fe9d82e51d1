"""Verdicts of several judges into one: normalised by their group, voted, scaled. Pure: no judge, no session."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grmpipe.algorithm.settings import MIN_GROUP_STD
from grmpipe.config.judge import Scale
from grmpipe.judge.verdict import mix_verdicts, outcome, sum_spans
from grmpipe.types import RewardSpan, Rollout, Verdict

ROUNDING = 1e-9  # in a reward


def reaches(reward: float, bound: float) -> bool:
    """Whether a reward is at least a bound; what rounding takes from it doesn't count."""
    return reward >= bound - ROUNDING


def in_reward_units(verdict: Verdict, scale: Scale) -> Verdict:
    """A judge's verdict with its score and its spread on [0, 1]."""
    spread = verdict.score_std / (scale.high - scale.low)
    return replace(verdict, score=verdict.outcome, score_std=spread, breakdown={})


def on_scale(verdict: Verdict, scale: Scale, breakdown: Mapping[str, float]) -> Verdict:
    """A verdict in reward units with its score and its spread on a judge's scale."""
    spread = (scale.high - scale.low) * verdict.score_std
    return replace(verdict, score=scale.to_score(verdict.score), score_std=spread, breakdown=breakdown)


def average_components(verdicts: Mapping[str, Verdict], weights: Mapping[str, float]) -> Verdict:
    """The weighted mean of components (see `mix_verdicts`), without those that their own juries missed."""
    absent = tuple(name for verdict in verdicts.values() for name in verdict.absent)
    return replace(mix_verdicts(verdicts, weights), breakdown={}, absent=absent)


def whole(rollout: Rollout, reward: float, behind: Sequence[Verdict], spread: float) -> Verdict:
    """One reward for the whole rollout, with the verdicts that are behind it."""
    return Verdict(
        rewards=outcome(rollout, reward),
        score=reward,
        breakdown={},
        score_std=spread,
        num_judgements=sum(verdict.num_judgements for verdict in behind),
        absent=tuple(name for verdict in behind for name in verdict.absent),
    )


def share_of_passes(rewards: Sequence[float], pass_at: float) -> float:
    """The majority: 1 if more than half of the rewards pass, 0 if less, 1/2 if exactly half."""
    passes = sum(reaches(reward, pass_at) for reward in rewards)
    return 0.5 if 2 * passes == len(rewards) else float(2 * passes > len(rewards))


# -- normalised by the group (GDPO, arXiv 2601.05242) ----------------------------------------------------------------


def average_normalised(
    group: Sequence[Mapping[str, Verdict]],
    mine: Mapping[str, Verdict],
    weights: Mapping[str, float],
) -> Verdict:
    """The weighted mean of a sibling's components; for training, of each by its own group: (reward - mean) / (standard
    deviation + MIN_GROUP_STD).

    group: the components of every sibling that has all of them. A component on which all agree gives 0. The reward and
    the score stay those of the plain weighted mean.
    """
    moved = {name: by_group(verdict, [one[name] for one in group]) for name, verdict in mine.items()}
    plain = average_components(mine, weights)
    return replace(plain, normalised=average_components(moved, weights).rewards)


def by_group(verdict: Verdict, group: Sequence[Verdict]) -> Verdict:
    """The verdict with its reward less the group's mean, in sample standard deviations of the group.

    A span of a mean of steps bears its share of the group's mean. Where rewards of several turns add up, all are only
    divided: siblings have different numbers of turns, so no share of the mean would leave equal turns equal, and the
    estimator subtracts a baseline of the group anyway.
    """
    rewards = [one.outcome for one in group]
    spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    if spread <= ROUNDING:
        return replace(verdict, rewards=sum_spans(replace(span, value=0.0) for span in verdict.rewards))
    mean = statistics.fmean(rewards)
    share = 0.0 if any(len(one.rewards) > 1 for one in group) else 1.0

    def centered(span: RewardSpan) -> float:
        return span.value - mean * (share if span.share is None else span.share)

    scale = 1 / (spread + MIN_GROUP_STD)
    return replace(verdict, rewards=tuple(replace(span, value=scale * centered(span)) for span in verdict.rewards))


class MeasuredSkill:
    """The skill of judges by the latest evaluation: twice the accuracy less one, so that a judge who is right half of
    the time weighs nothing; at least 0.

    For independent judges the best weight of a vote is the log-odds of being right (Nitzan and Paroush 1982); this is
    its linear form, which a small sample doesn't make infinite.
    """

    def __init__(self) -> None:
        self._accuracy: dict[str, float] = {}

    def take_accuracies(self, accuracy: Mapping[str, float]) -> None:
        """Take the accuracies of an evaluation; of judges that it didn't measure the earlier ones hold."""
        self._accuracy |= accuracy

    @property
    def accuracy(self) -> Mapping[str, float]:
        """What was measured last, for a checkpoint."""
        return dict(self._accuracy)

    def weights(self) -> dict[str, float]:
        """Judge -> weight, of those measured so far."""
        return {name: max(0.0, 2 * accuracy - 1) for name, accuracy in self._accuracy.items()}
