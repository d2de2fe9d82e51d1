"""Labels of several raters: split, undone, replaced, put together; and how far raters agree. Pure."""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from grmpipe.config.keys.user_code import format_value
from grmpipe.data.labelled_schemas import LABELS, NO, YES
from grmpipe.data.rows import Findings, Place, Row
from grmpipe.types import Labelled, RankedResponses

MAX_NAMED = 6  # raters in a line of the console


def drop_undone(rows: Sequence[Place], findings: Findings) -> list[Place]:
    """The rows without those that a later row undoes. An undoing can be undone."""
    undone, kept, gone = set[str](), list[Place](), list[str]()
    for place in reversed(rows):
        _, where, row = place
        line, earlier = row.get("id"), row.get("undoes")
        if line is not None and str(line) in undone:
            if earlier is None:
                gone.append(where)
        elif earlier is not None:
            undone.add(str(earlier))
        else:
            kept.append(place)
    for where in reversed(gone):
        findings.add("annotations are undone by a later one", where)
    return kept[::-1]


def split_ratings(row: Row, where: str) -> Iterator[Row]:
    """A row for each rater of a column `ratings`: a mapping from raters, or a list, of labels or of objects with them.
    The row itself if it has another label. Raises ValueError.
    """
    ratings = row.get("ratings")
    about = [row.get(field) for field in ("response", "responses", "response_a")]
    if ratings is None or any(row.get(field) is not None for field in LABELS) or about == [None] * 3:
        yield row
        return
    if not isinstance(ratings, Mapping | list) or not ratings:
        raise ValueError(
            f"{where}: ratings: expected {{rater: label}} or a list of labels, got {format_value(ratings)}"
        )
    named = ratings if isinstance(ratings, Mapping) else {f"rater {n}": one for n, one in enumerate(ratings, 1)}
    for rater, label in named.items():
        if isinstance(label, Mapping):
            yield {**row, "rater": rater, **label}
        elif label is not None:
            yield {**row, "rater": rater, name_label(row, label): label}


def name_label(row: Row, label: object) -> str:
    """The field of a rater's label, by what the row is about."""
    if row.get("responses") is not None:
        return "grades" if isinstance(label, list) else "best"
    if row.get("response_a") is not None:
        return "preference"
    is_yes_no = isinstance(label, bool) or (isinstance(label, str) and label.strip().casefold() in (*YES, *NO))
    return "right" if is_yes_no else "score"


def name_kind(item: Labelled) -> str:
    if isinstance(item, RankedResponses):
        return "pairs" if len(item.responses) == 2 else "lists"
    return "yes or no" if item.is_yes_no else "scores"


def combine_raters(read: Iterable[tuple[str, Labelled]], high: float, findings: Findings) -> Iterator[Labelled]:
    """One item for all labels of the same texts and subset: the mean of scores or grades, the majority of yes and no.
    Of a rater the last label counts. Items without a rater (an empty name) stay by themselves.

    high: the score of a yes.
    """
    by_texts: dict[Hashable, dict[str, Labelled]] = {}
    for number, (rater, item) in enumerate(read):
        about = (item.prompt.messages, name_kind(item), item.subset, *sorted(item.responses))
        own = by_texts.setdefault(about if rater else number, {})
        if rater in own:
            findings.add("labels are replaced by a later one of the same rater", item.item_id)
        own[rater] = item
    for own in by_texts.values():
        first = next(iter(own.values()))
        if "" in own:
            yield first
        elif isinstance(first, RankedResponses):
            ratings = {rater: align_grades(one, first.responses) for rater, one in own.items()}
            grades = tuple(fmean(grades) for grades in zip(*ratings.values(), strict=True))
            yield dataclasses.replace(first, grades=grades, ratings=ratings)
        else:
            scores = {rater: one.labels[0] for rater, one in own.items()}
            label = fmean(scores.values())
            if first.is_yes_no:
                num_yes = sum(score == high for score in scores.values())
                if 2 * num_yes == len(scores):
                    findings.add("items have as many yes as no, and are left out", first.item_id)
                    continue
                label = max(scores.values()) if 2 * num_yes > len(scores) else min(scores.values())
            yield dataclasses.replace(first, score=label, ratings=scores)


def align_grades(item: Labelled, responses: Sequence[str]) -> tuple[float, ...]:
    """Its grades in the order of these responses, which are its own in another order."""
    grades = dict(zip(item.responses, item.labels, strict=True))
    return tuple(grades[response] for response in responses)


# -- in words ----------------------------------------------------------------------------------------------------------


def describe_items(items: Sequence[Labelled]) -> str:
    """How many items there are of each kind, by whom, and how far raters agree."""
    kinds = Counter(map(name_kind, items))
    no_best = Counter(name_kind(item) for item in items if isinstance(item, RankedResponses) and item.best is None)
    said = [
        f"{n} {kind}" + f" ({no_best[kind]} without a single best)" * (kind in no_best) for kind, n in kinds.items()
    ]
    return "; ".join([", ".join(said), *describe_raters(items)])


def describe_raters(items: Sequence[Labelled]) -> Iterator[str]:
    counts = Counter(rater for item in items for rater in item.ratings)
    if not counts:
        return
    named = [f"{rater} {count}" for rater, count in counts.most_common(MAX_NAMED)] + ["..."] * (len(counts) > MAX_NAMED)
    yield f"{len(counts)} raters ({', '.join(named)})" if len(counts) > 1 else f"all by the rater {named[0]}"
    if len(counts) == 1:
        return
    by_kind: defaultdict[str, list[list[float]]] = defaultdict(list)
    for item in (item for item in items if len(item.ratings) > 1):
        by_kind[name_kind(item)] += list_units(item)
    for kind, units in by_kind.items():
        alpha = compute_alpha(units)
        words = "unknown, as all labels are equal" if alpha is None else f"{alpha:.2f} (1: always, 0: as by chance)"
        shared = sum(len(item.ratings) > 1 and name_kind(item) == kind for item in items)
        yield f"their agreement on {shared} {kind} by Krippendorff's alpha: {words}"
    met = {pair for item in items for pair in itertools.combinations(sorted(item.ratings), 2)}
    apart = [pair for pair in itertools.combinations(sorted(counts), 2) if pair not in met]
    if apart:
        first = " and ".join(apart[0])
        more = f", and {len(apart) - 1} more pairs of raters" if len(apart) > 1 else ""
        yield f"{first} share no item, so that nothing says how far they agree{more}"


def list_units(item: Labelled) -> list[list[float]]:
    """What raters of an item may agree about: its score, or the order of each two of its responses (1, 0 or -1)."""
    if not isinstance(item, RankedResponses):
        return [list(item.ratings.values())]
    pairs = itertools.combinations(range(len(item.responses)), 2)
    return [[float((own[i] > own[j]) - (own[i] < own[j])) for own in item.ratings.values()] for i, j in pairs]


def compute_alpha(units: Iterable[Sequence[float]]) -> float | None:
    """Krippendorff's alpha with squared differences (Krippendorff 2011, "Computing Krippendorff's alpha-reliability"):
    1 - observed / expected disagreement, over units with at least two ratings. Of two values it is the nominal one.
    None where the ratings don't differ at all.
    """
    rated = [unit for unit in units if len(unit) > 1]
    values = [value for unit in rated for value in unit]

    def sum_differences(ratings: Sequence[float]) -> float:
        """Half the sum over all ordered pairs."""
        center = fmean(ratings)
        return len(ratings) * sum((value - center) ** 2 for value in ratings)

    if len(set(values)) < 2:
        return None
    observed = sum(sum_differences(unit) / (len(unit) - 1) for unit in rated) / len(values)
    return 1 - observed / (sum_differences(values) / (len(values) * (len(values) - 1)))
