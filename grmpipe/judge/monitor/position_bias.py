"""Biases of a judge: position and length. Pure: reads judgements and scores, asks no judge."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grmpipe.counts import Counts
from grmpipe.types import Judgement, Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips(Counts):
    """The swap test on existing judgements: whether two judgements of the same two responses disagree.

    swapped: shown in different orders. same: shown in the same order, which is sampling noise alone. The difference of
             the two is the bias. A judgement that calls the two equal disagrees with none.
    """

    swapped: int = 0
    swapped_flips: int = 0
    same: int = 0
    same_flips: int = 0

    def metrics(self) -> Metrics:
        """Disagreeing shares of the comparisons. A kind without comparisons is left out."""
        shares = {
            "order_flips_share": (self.swapped_flips, self.swapped),
            "noise_flips_share": (self.same_flips, self.same),
        }
        return {name: flips / compared for name, (flips, compared) in shares.items() if compared}


def order_flips(judgements: Iterable[Judgement]) -> Flips:
    """Flips over all pairs of responses that at least two judgements compared. Empty for judges of single responses."""
    views: defaultdict[tuple[str, int, int], list[tuple[bool, int]]] = defaultdict(list)
    for judgement in judgements:
        places = {sibling: place for place, sibling in enumerate(judgement.siblings)}
        for a, b in itertools.combinations(sorted(places), 2):
            score_a, score_b = judgement.scores[places[a]], judgement.scores[places[b]]
            views[judgement.group_id, a, b].append((places[a] < places[b], (score_a > score_b) - (score_a < score_b)))
    total = Flips()
    for seen in views.values():
        for (first_order, first), (second_order, second) in itertools.combinations(seen, 2):
            flip = int(first * second < 0)
            if first_order == second_order:
                total += Flips(same=1, same_flips=flip)
            else:
                total += Flips(swapped=1, swapped_flips=flip)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionBias(Counts):
    """Counts of comparing judgements: orders, and which place won. Those of two judges add up: judgements of different
    judges are never compared with each other.
    """

    flips: Flips = Flips()
    compared: int = 0
    tied: int = 0  # without a single winner
    first_won: int = 0  # the one that was shown first

    def with_judgements(self, judgements: Sequence[Judgement]) -> PositionBias:
        places = [place_of_winner(judgement) for judgement in judgements if len(judgement.siblings) > 1]
        if not places:
            return self
        return PositionBias(
            flips=self.flips + order_flips(judgements),
            compared=self.compared + len(places),
            tied=self.tied + places.count(None),
            first_won=self.first_won + places.count(0),
        )

    def metrics(self) -> Metrics:
        """Shares of the comparisons. A kind without comparisons is left out. A fair judge of n responses lets the first
        place win 1 / n of them.
        """
        if not self.compared:
            return {}
        won = self.compared - self.tied
        wins = {"first_place_share": self.first_won / won} if won else {}
        return {"ties_share": self.tied / self.compared, **wins, **self.flips.metrics()}


def bias_metrics(by_judge: Mapping[str, PositionBias]) -> Metrics:
    """Metrics of all judges together and, under their names, of each of several. A single judge has no name."""
    metrics = {f"judge/{name}": share for name, share in sum(by_judge.values(), PositionBias()).metrics().items()}
    for judge in filter(None, by_judge):
        metrics |= {f"judge/{judge}/{name}": share for name, share in by_judge[judge].metrics().items()}
    return metrics


def place_of_winner(judgement: Judgement) -> int | None:
    """The winner's place in the order shown. None without a single winner."""
    best = max(judgement.scores)
    return judgement.scores.index(best) if judgement.scores.count(best) == 1 else None


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson correlation. None if one of the two doesn't vary."""
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    return statistics.correlation(xs, ys)


def correlation_within(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Correlation of pairs after subtracting their group's mean, which removes the difficulty of the question."""
    xs: list[float] = []
    ys: list[float] = []
    for group in groups:
        if len(group) > 1:
            mean_x, mean_y = (statistics.fmean(pair[axis] for pair in group) for axis in (0, 1))
            xs += [x - mean_x for x, _ in group]
            ys += [y - mean_y for _, y in group]
    return correlation(xs, ys)
