"""The vote of a judge: several judgements of a response into one score, and that into its verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.config.judge_tables import VOTES, VOTES_WITH_META_RM
from grmpipe.config.keys.user_code import UserCodeError, call_guarded, describe_code, format_value, to_number
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.judge.verdict import COMPONENT, make_failure, outcome_place
from grmpipe.models.types import EngineDied, EngineRefused
from grmpipe.types import Criterion, Failed, Judgement, RewardSpan, Rollout, Verdict

Vote = Callable[[Sequence[float]], float]  # scores that one response got -> its score
WON, TIED, LOST = 1.0, 0.5, 0.0  # of one response of a pair
MET = 0.5  # the least reward of an essential criterion that is met


def mean(scores: Sequence[float]) -> float:
    """The mean: SPCT's vote on the judge's own scale (arXiv 2504.02495 sums; the mean gives the same order)."""
    return math.fsum(scores) / len(scores)


def median(scores: Sequence[float]) -> float:
    """The median: one outlier doesn't move it."""
    return statistics.median(scores)


def majority(scores: Sequence[float]) -> float:
    """The score that most judgements gave; the mean of these if several tie."""
    return statistics.fmean(sorted(statistics.multimode(scores)))


def total(scores: Sequence[float]) -> float:
    """The sum: k judgements on 1..10 give k..10k (SPCT, arXiv 2504.02495)."""
    return math.fsum(scores)


def score_std(scores: Sequence[float]) -> float:
    """Population standard deviation, in score units; 0 for a single vote."""
    middle = mean(scores)
    return math.sqrt(math.fsum((score - middle) * (score - middle) for score in scores) / len(scores))


def vote_named(name: str) -> Vote:
    """The vote that `judge.vote` names, if it uses no meta-RM. One of the user's own raises ValueError, which names it,
    for what is no score.
    """
    found = cast(Vote, VOTES.find_object(name))
    return found if name in VOTES else _checked(found)


def _checked(vote: Vote) -> Vote:
    def checked(scores: Sequence[float]) -> float:
        owner = f"judge.vote: {describe_code(vote)}"
        try:
            with call_guarded(owner):
                given = vote(scores)
        except UserCodeError as error:
            raise ValueError(str(error)) from error.__cause__
        if (score := to_number(given)) is None:
            raise ValueError(
                f"{owner} returned {format_value(given)}; return a number, the score of {len(scores)} judgements"
            )
        return score

    return checked


def pair_result(*orders: Sequence[float]) -> float:
    """The result of one response of a pair: the mean of its votes within each order of showing, then over the orders.

    So a failed judgement in one order doesn't give the other more weight: position bias stays balanced. Needs at least
    one vote in each order.
    """
    # Exact: in floats, votes in thirds or sevenths would miss a tie by a rounding.
    share = sum(Fraction(math.fsum(votes)) / len(votes) for votes in orders) / len(orders)
    return WON if share > TIED else LOST if share < TIED else TIED


# -- weighted by a meta-RM -------------------------------------------------------------------------------------------


def average_weighted(scores: Sequence[float], weights: Sequence[float]) -> float:
    """The mean weighted by values of 0 or more; the plain mean if all are 0."""
    total_weight = math.fsum(weights)
    if total_weight == 0:
        return mean(scores)
    return math.fsum(weight * score for weight, score in zip(weights, scores, strict=True)) / total_weight


def best_indices(weights: Sequence[float], count: int) -> list[int]:
    """The indices of the `count` highest weights, in ascending order; of equal weights the first."""
    ranked = sorted(range(len(weights)), key=lambda index: -weights[index])
    return sorted(ranked[:count])


# -- from votes to a verdict -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Weights:
    """How the scores of a response's parts become its one score: their weighted mean. With faults or essential
    criteria: the points that it earned of those that it could earn, from 0 to 1.

    parts:     a weight per part; those above 0 sum to 1. One below 0 is a fault's.
    essential: the parts of which at least half must be met, or the reward is at most `cap`.
    """

    parts: tuple[float, ...]
    essential: tuple[int, ...] = ()
    cap: float = 0.0

    @staticmethod
    def of_rubric(rubric: Sequence[Criterion], cap: float, kept: Collection[Criterion] | None = None) -> Weights:
        """kept: without those that are left out, which are none with a weight below 0; None: all. The others bear their
        points, so that a fault costs what it costs with all of them.
        """
        kept = rubric if kept is None else kept
        whole, earned = (math.fsum(one.weight for one in some if one.weight > 0) for some in (rubric, kept))
        return Weights(
            parts=tuple(one.weight / (earned if one.weight > 0 else whole) for one in kept),
            essential=tuple(index for index, one in enumerate(kept) if one.essential),
            cap=cap,
        )

    def to_score(self, scores: Sequence[float], scale: Scale) -> float:
        """The score on the scale."""
        if self._is_mean:
            return self._sum(scores)
        return scale.to_score(self.to_reward([scale.to_reward(score) for score in scores]))

    def to_reward(self, rewards: Sequence[float]) -> float:
        """The reward of the rewards of the parts."""
        if self._is_mean:
            return self._sum(rewards)
        earned = min(max(self._sum(rewards), 0.0), 1.0)
        return min(earned, self.cap) if any(rewards[index] < MET for index in self.essential) else earned

    @property
    def _is_mean(self) -> bool:
        return not self.essential and min(self.parts) > 0

    def _sum(self, values: Sequence[float]) -> float:
        return math.fsum(weight * value for weight, value in zip(self.parts, values, strict=True))


ONE_PART = Weights((1.0,))


def count_votes(
    name: str,
    scores: Sequence[Sequence[float | None]],
    vote: Vote,
    scale: Scale,
    weights: Weights,
    places: Sequence[RewardSpan],
) -> Verdict:
    """The verdict of a judge called `name` over the judgements in the vote (at least one).

    scores: one per judgement and part; None where a judgement has none of a part, which others then have. places: the
    tokens that get the rewards, one place per part or one for all; their values are ignored. Each part is voted on by
    itself: a judgement that is an outlier on one step still counts on the others.
    """
    votes = [vote([score for score in given if score is not None]) for given in zip(*scores, strict=True)]
    whole = [cast(Sequence[float], given) for given in scores if None not in given]
    rewards = [scale.to_reward(score) for score in votes]
    reward = weights.to_reward(rewards)
    shares = [weight * value for weight, value in zip(weights.parts, rewards, strict=True)]
    values = shares if len(places) > 1 else [reward]
    return Verdict(
        rewards=tuple(replace(place, value=value) for place, value in zip(places, values, strict=True)),
        score=weights.to_score(votes, scale),
        breakdown={name: reward},
        score_std=score_std([weights.to_score(given, scale) for given in whole]) if whole else 0.0,
        num_judgements=len(scores),
    )


def voted(name: str, rollout: Rollout, scores: Sequence[float], vote: Vote, scale: Scale) -> Verdict:
    """The verdict on a whole rollout: `count_votes` with one score per judgement."""
    return count_votes(name, [(score,) for score in scores], vote, scale, ONE_PART, (outcome_place(rollout),))


class JudgeVote:
    """The vote of one judge, found by its name when the judge is made: whose judgements count, the verdict over them,
    and when there is none because they disagree too much.
    """

    def __init__(self, config: JudgeConfig, meta_rm: MetaRm | None) -> None:
        """meta_rm: for the votes that weigh judgements by it. Raises ValueError if such a vote has none."""
        if config.vote in VOTES_WITH_META_RM and meta_rm is None:
            raise ValueError(f"vote: {config.vote} needs a meta-RM, and there is none; type judge.vote=mean")
        self._config = config
        self._meta_rm = meta_rm if config.vote in VOTES_WITH_META_RM else None
        self._vote = mean if self._meta_rm is not None else vote_named(config.vote)

    async def select(self, judgements: Sequence[Judgement], priority: int) -> tuple[Sequence[Judgement], Vote] | Failed:
        """The judgements that enter the vote, and the vote over the scores that they give to one response."""
        if self._meta_rm is None:
            return judgements, self._vote
        try:
            weights = await self._meta_rm.scores(judgements, priority)
        except (EngineDied, EngineRefused) as error:
            return make_failure("died" if isinstance(error, EngineDied) else "refused", f"meta-RM: {error}", 1)
        if self._config.vote == "weighted":
            return judgements, lambda scores: average_weighted(scores, weights)
        count = self._config.votes.k_meta or max(1, self._config.num_judgements // 2)
        return [judgements[index] for index in best_indices(weights, count)], self._vote

    async def count(
        self, judgements: Sequence[Judgement], weights: Weights, places: Sequence[RewardSpan], priority: int
    ) -> Verdict | Failed:
        """The verdict over judgements of one response, each with a score per part."""
        counted = await self.select(judgements, priority)
        if isinstance(counted, Failed):
            return counted
        chosen, vote = counted
        return self.make_verdict([judgement.scores for judgement in chosen], vote, weights, places)

    def make_verdict(
        self,
        scores: Sequence[Sequence[float | None]],
        vote: Vote,
        weights: Weights,
        places: Sequence[RewardSpan],
    ) -> Verdict | Failed:
        """The verdict as the judge shows it; arguments as in `count_votes`."""
        verdict = count_votes(COMPONENT, scores, vote, self._config.scale, weights, places)
        shown = replace(verdict, score=self._config.to_shown_score(verdict.score))
        return self.abstention(verdict.score_std) or shown

    def abstention(self, spread: float) -> Failed | None:
        """The failure to return if judgements disagree too much (`judge.votes.abstain_above_std`), else None."""
        limit = self._config.votes.abstain_above_std
        if limit is None or spread <= limit:
            return None
        detail = f"the spread of the judgements is {spread:.2f} (std); judge.votes.abstain_above_std={limit:g}"
        return make_failure("undecided", detail, 1)
