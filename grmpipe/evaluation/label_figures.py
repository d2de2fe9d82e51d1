"""Figures of a judge, and of people, against labels: what fits the kind of each label. Pure.

A row is an item with scores of its responses on the labels' scale. Rows that lack a score are in no figure here: they
are failures, which the accuracy counts as wrong.
"""

import itertools
import math
import statistics
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from grmpipe.data.prompts import identify_prompt
from grmpipe.evaluation.agreement import compute_kendall, compute_quadratic_kappa, compute_spearman, map_crosswise
from grmpipe.evaluation.intervals import Estimate, estimate_clustered, estimate_correlation, estimate_difference
from grmpipe.evaluation.judged_items import JudgedItem, Scores, compare_orders, decide_outcome, is_tie
from grmpipe.train.scalar.classification import auc
from grmpipe.types import Labelled, RankedResponses, ScoredResponse

K = TypeVar("K", bound=Hashable)
Row = tuple[Labelled, Scores]
MIN_FOR_LENGTHS = 9  # items


def measure_figures(rows: Sequence[Row], pass_score: float) -> dict[str, Estimate]:
    """All figures that the labels allow, by name (docs/evaluating.md lists them)."""
    known = [(item, scores) for item, scores in rows if all(i in scores for i in range(len(item.responses)))]
    scored = [(item, scores[0]) for item, scores in known if isinstance(item, ScoredResponse)]
    figures = measure_pairs([(item, scores) for item, scores in known if isinstance(item, RankedResponses)])
    figures |= measure_scores([(item, score) for item, score in scored if not item.is_yes_no])
    return figures | measure_decisions([(item, score) for item, score in scored if item.is_yes_no], pass_score)


def measure_pairs(rows: Sequence[tuple[RankedResponses, Scores]]) -> dict[str, Estimate]:
    """The share of ties by the labels whose scores are equal too; and, where there are more than two grades, the share
    of pairs of different grades that the scores order so.
    """
    ties = [(item, [float(len(set(scores.values())) == 1)]) for item, scores in rows if is_tie(item)]
    figures = {"tied_alike": estimate_clustered(gather(ties))} if ties else {}
    if all(len(set(item.grades)) < 3 for item, _ in rows):
        return figures
    ordered = [
        (item, [float((scores[a] - scores[b]) * (item.grades[a] - item.grades[b]) > 0) for a, b in list_pairs(item)])
        for item, scores in rows
    ]
    return figures | {"pair_accuracy": estimate_clustered(gather(ordered))}


def measure_scores(rows: Sequence[tuple[ScoredResponse, float]]) -> dict[str, Estimate]:
    if not rows:
        return {}
    labels, scores = [item.score for item, _ in rows], [score for _, score in rows]
    names = [identify_prompt(item.prompt) for item, _ in rows]
    places = list(gather_places(names).values())

    def correlate(compute: Callable[[Sequence[float], Sequence[float]], float]) -> Estimate:
        return estimate_correlation(lambda at: compute([scores[i] for i in at], [labels[i] for i in at]), places)

    figures = {
        "spearman": correlate(compute_spearman),
        "kendall_tau": correlate(compute_kendall),
        "quadratic_kappa": correlate(compute_quadratic_kappa),
        "score_error": estimate_distance(scores, labels, names),
    }
    mapped = map_crosswise(scores, labels, names)
    return figures if mapped is None else figures | {"mapped_error": estimate_distance(mapped.tolist(), labels, names)}


def estimate_distance(scores: Sequence[float], labels: Sequence[float], names: Sequence[Hashable]) -> Estimate:
    distances: dict[Hashable, list[float]] = {}
    for name, score, label in zip(names, scores, labels, strict=True):
        distances.setdefault(name, []).append(abs(score - label))
    found = estimate_difference(distances, are_shares=False)
    return Estimate(mean=found.mean, low=max(0.0, found.low), high=found.high, num_clusters=found.num_clusters)


def measure_decisions(rows: Sequence[tuple[ScoredResponse, float]], pass_score: float) -> dict[str, Estimate]:
    """Of yes or no. Passing is positive: a false positive is what a policy learns."""
    if not rows:
        return {}
    decided = [(item, score, score >= pass_score, item.score >= pass_score) for item, score in rows]
    shares = {
        "precision": [(item, [float(is_yes)]) for item, _, passes, is_yes in decided if passes],
        "recall": [(item, [float(passes)]) for item, _, passes, is_yes in decided if is_yes],
        "false_positive_rate": [(item, [float(passes)]) for item, _, passes, is_yes in decided if not is_yes],
    }
    figures = {name: estimate_clustered(gather(own)) for name, own in shares.items() if own}

    def compute_gini(at: Sequence[int]) -> float:
        """2 AUC - 1, which is 0 by chance as a correlation is."""
        yes = [decided[i][3] for i in at]
        return 2 * auc([decided[i][1] for i in at], yes) - 1 if len(set(yes)) == 2 else math.nan

    places = gather_places([identify_prompt(item.prompt) for item, _ in rows])
    gini = estimate_correlation(compute_gini, list(places.values()))
    if math.isnan(gini.mean):
        return figures
    mean, low, high = ((value + 1) / 2 for value in (gini.mean, gini.low, gini.high))
    return figures | {"auc": Estimate(mean=mean, low=low, high=high, num_clusters=gini.num_clusters)}


def measure_orders(judged: Sequence[JudgedItem]) -> dict[str, Estimate]:
    """Of one judge that compares, on pairs of responses that it saw in both orders: whether it was right in each, and
    whether it preferred the same one.
    """
    right: list[tuple[Labelled, list[float]]] = []
    same: list[tuple[Labelled, list[float]]] = []
    for one in judged:
        if not isinstance(one.item, RankedResponses):
            continue
        for a, b in list_pairs(one.item):
            better, worse = (a, b) if one.item.grades[a] > one.item.grades[b] else (b, a)
            first, last = compare_orders(one.judgements, better, worse)
            if first is not None and last is not None:
                right.append((one.item, [float(first > 0 and last > 0)]))
                same.append((one.item, [float((first > 0) == (last > 0) and (first < 0) == (last < 0))]))
    if not right:
        return {}
    return {
        "both_orders_accuracy": estimate_clustered(gather(right)),
        "consistency": estimate_clustered(gather(same)),
    }


def list_pairs(item: RankedResponses) -> list[tuple[int, int]]:
    """The pairs of responses of different grades."""
    pairs = itertools.combinations(range(len(item.responses)), 2)
    return [(a, b) for a, b in pairs if item.grades[a] != item.grades[b]]


# -- people ------------------------------------------------------------------------------------------------------------


def measure_people(items: Sequence[Labelled], pass_score: float) -> dict[str, Estimate]:
    """The same figures of each rater against the label that the other raters of the item give."""
    rows = [row for item in items if len(item.ratings) > 1 for row in leave_out_each(item, pass_score)]
    if not rows:
        return {}
    return {**measure_rated(rows, pass_score), **measure_figures(rows, pass_score)}


def measure_rated(rows: Sequence[Row], pass_score: float) -> dict[str, Estimate]:
    """The accuracy on the items with several raters, where people and judges compare."""
    decided = [
        (item, [float(decide_outcome(item, scores, pass_score) == "right")])
        for item, scores in rows
        if len(item.ratings) > 1 and not is_tie(item)
    ]
    return {"rated_accuracy": estimate_clustered(gather(decided))} if decided else {}


def leave_out_each(item: Labelled, pass_score: float) -> Iterator[Row]:
    """Each rater's row, with the label of the others: their mean, of a yes or no their majority."""
    if isinstance(item, RankedResponses):
        for rater, grades in item.ratings.items():
            others = [own for name, own in item.ratings.items() if name != rater]
            yield replace(item, grades=tuple(map(statistics.fmean, zip(*others, strict=True)))), dict(enumerate(grades))
        return
    for rater, score in item.ratings.items():
        scores = [own for name, own in item.ratings.items() if name != rater]
        if item.is_yes_no:
            yes = [own >= pass_score for own in scores]
            if 2 * sum(yes) == len(yes):  # no majority, so no label
                continue
            scores = [own for own, is_yes in zip(scores, yes, strict=True) if is_yes == (2 * sum(yes) > len(yes))]
        yield replace(item, score=statistics.fmean(scores)), {0: score}


# -- parts of the items ------------------------------------------------------------------------------------------------


def split_by_trait(items: Sequence[Labelled]) -> dict[str, dict[str, list[int]]]:
    """The items, as their places, by source, by the length of the responses (thirds) and by the script of the prompt.
    A trait that all share is left out.
    """
    lengths = [statistics.fmean(map(len, item.responses)) for item in items]
    ends = statistics.quantiles(lengths, n=3) if len(items) >= MIN_FOR_LENGTHS else [math.inf, math.inf]
    named = {
        "source": [item.prompt.source or "none" for item in items],
        "length": [("short", "middle", "long")[(length > ends[0]) + (length > ends[1])] for length in lengths],
        "script": [guess_script(item.prompt.messages[-1].content) for item in items],
    }
    traits = {trait: gather_places(names) for trait, names in named.items()}
    order = {"short": 0, "middle": 1, "long": 2}
    return {
        trait: dict(sorted(parts.items(), key=lambda part: (order.get(part[0], 0), part[0])))
        for trait, parts in traits.items()
        if len(parts) > 1
    }


def guess_script(text: str) -> str:
    """The script of most of its letters, as Unicode names it: latin, cyrillic, cjk."""
    names = (unicodedata.name(char, "").split(" ")[0].lower() for char in text if char.isalpha())
    return next((name for name, _ in Counter(names).most_common(1)), "none")


def gather(rows: Iterable[tuple[Labelled, Sequence[float]]]) -> dict[Hashable, list[float]]:
    """The values by prompt, which items share; without prompts that have none."""
    found: dict[Hashable, list[float]] = {}
    for item, values in rows:
        if values:
            found.setdefault(identify_prompt(item.prompt), []).extend(values)
    return found


def gather_places(names: Sequence[K]) -> dict[K, list[int]]:
    """The places of each name."""
    found: dict[K, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(name, []).append(place)
    return found
