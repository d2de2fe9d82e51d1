"""Votes of fewer judgements: scores of subsets of the judgements sampled once. Pure."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grmpipe.config.judge import Scale
from grmpipe.judge.protocols.pairwise import read_votes
from grmpipe.judge.votes import WON, Vote, best_indices, mean, pair_result
from grmpipe.types import Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """All judgements of one question: a response, a list, or a pair in either order. None: requested, but failed.

    weights: the meta-RM's, one per judgement; None without a meta-RM.
    """

    siblings: frozenset[int]
    judgements: tuple[Judgement | None, ...]
    weights: tuple[float, ...] | None = None


def make_ballots(
    judgements: Sequence[Judgement], num_asked: int, weights: Sequence[float] | None = None
) -> tuple[Ballot, ...]:
    """One ballot per question. Missing judgements (up to `num_asked`) failed: samples are exchangeable, so they come
    last.
    """
    indices: dict[frozenset[int], list[int]] = {}
    for index, judgement in enumerate(judgements):
        indices.setdefault(frozenset(judgement.siblings), []).append(index)
    return tuple(
        Ballot(
            siblings=siblings,
            judgements=(*(judgements[i] for i in own), *(None,) * (num_asked - len(own))),
            weights=None if weights is None else (*(weights[i] for i in own), *(0.0,) * (num_asked - len(own))),
        )
        for siblings, own in indices.items()
    )


def draw_subsets(num_sampled: int, k: int, most: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Every subset of k of the sampled judgements, or `most` of them at random."""
    if math.comb(num_sampled, k) <= most:
        return list(itertools.combinations(range(num_sampled), k))
    return [tuple(sorted(rng.sample(range(num_sampled), k))) for _ in range(most)]


Choose = Callable[[Ballot, Sequence[int]], Sequence[Judgement]]  # the judgements of a subset that enter the vote


def all_drawn(ballot: Ballot, draw: Sequence[int]) -> list[Judgement]:
    return [judgement for index in draw if (judgement := ballot.judgements[index]) is not None]


def best_by_meta_rm(ballot: Ballot, draw: Sequence[int]) -> list[Judgement]:
    """The better half of a subset, by the meta-RM (SPCT's k_meta = k / 2, arXiv 2504.02495)."""
    assert ballot.weights is not None
    drawn = [(one, ballot.weights[index]) for index in draw if (one := ballot.judgements[index]) is not None]
    return [drawn[i][0] for i in best_indices([weight for _, weight in drawn], max(1, len(draw) // 2))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """How judgements become scores.

    pairwise: a pair is decided by the mean of its orders, if the subset has both, and a score is the share of pairs
              won; otherwise `vote` is over the scores given.
    margins:  the scale by which votes on a pair count, which is not decided then; None: only who is better counts.
    to_score: the score of a response by those of its parts, as criteria are.
    """

    vote: Vote
    pairwise: bool = False
    margins: Scale | None = None
    to_score: Callable[[Sequence[float]], float] = statistics.fmean


def scores_of_draw(
    ballots: Sequence[Ballot], draw: Sequence[int], counting: Counting, choose: Choose = all_drawn
) -> dict[int, float]:
    """sibling -> its score by a subset of judgements. A sibling without judgements in it has no score."""
    given: dict[int, list[float]] = {}
    for ballot in ballots:
        for sibling, score in of_matter(ballot.siblings, choose(ballot, draw), counting).items():
            given.setdefault(sibling, []).append(score)
    return {sibling: statistics.fmean(scores) for sibling, scores in given.items()}


def of_matter(siblings: frozenset[int], judgements: Sequence[Judgement], counting: Counting) -> Mapping[int, float]:
    if not judgements:
        return {}
    if counting.pairwise:
        lower, higher = sorted(siblings)
        orders = [votes for votes in read_votes(judgements, lower, counting.margins) if votes]
        won = pair_result(*orders) if counting.margins is None else mean([mean(votes) for votes in orders])
        return {lower: won, higher: WON - won}
    return {sibling: vote_parts(sibling, judgements, counting) for sibling in siblings}


def vote_parts(sibling: int, judgements: Sequence[Judgement], counting: Counting) -> float:
    """The score of one response, whose parts are voted on by themselves as the judge does."""
    given = [one.scores if len(one.siblings) == 1 else (one.scores[one.siblings.index(sibling)],) for one in judgements]
    return counting.to_score([counting.vote(part) for part in zip(*given, strict=True)])
