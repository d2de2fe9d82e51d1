"""The labels of judging tasks as texts, and how far a judgement's scores agree with one. Pure.

exactly 7                    the score of a response
at least 8, below 8          only its side is known
graded 7.5                   the nearer the better
graded 3 5 1, best 2 of 3    responses in the order shown
exactly 10; any; below 6     a label for each step or criterion, in the order shown; any: it has none
exactly 2 from 0 to 3        of a criterion with levels: other scores are none
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

import numpy as np

from grmpipe.config.judge import Scale

PART_LABEL = re.compile(r"(exactly|at least|below|graded) (-?[0-9.]+)(?: from (-?[0-9]+) to (-?[0-9]+))?")
GRADED_LABEL = re.compile(r"graded((?: -?[0-9.]+){2,})")  # the grades of several responses, in the order shown
BEST_LABEL = re.compile(r"best ([0-9]+) of ([0-9]+)")  # response numbers in the order shown, from 1
RIGHT, WRONG = 1.0, -1.0  # SPCT's rewards (arXiv 2504.02495); unparseable is wrong, the format earns nothing
Kind = Literal["exactly", "at least", "below", "graded"]
UNKNOWN, BETWEEN = "any", "; "


@dataclass(frozen=True, slots=True)
class PartLabel:
    """The label of one score. levels: the lowest and the highest score that there may be; None: any of the scale."""

    kind: Kind
    score: float
    levels: tuple[int, int] | None = None

    def __str__(self) -> str:
        levels = f" from {self.levels[0]} to {self.levels[1]}" if self.levels is not None else ""
        return f"{self.kind} {self.score:g}{levels}"

    def is_met_by(self, score: float) -> bool:
        if self.levels is not None and not self.levels[0] <= score <= self.levels[1]:
            return False
        if self.kind == "graded":
            return round_score(score) == round_score(self.score)
        return {"exactly": score == self.score, "at least": score >= self.score, "below": score < self.score}[self.kind]

    def measure(self, score: float, scale: Scale) -> float:
        """How far a score agrees: RIGHT or WRONG; where the label is graded, by their distance between them."""
        low, high = self.levels or (scale.low, scale.high)
        if self.kind != "graded" or not low <= score <= high:
            return RIGHT if self.is_met_by(score) else WRONG
        return RIGHT - (RIGHT - WRONG) * min(1.0, abs(score - self.score) / (high - low))


def round_score(score: float) -> int:
    """The nearest whole score, upwards from a half."""
    return math.floor(score + 0.5)


def join_parts(labels: Sequence[PartLabel | None]) -> str:
    """The label of a judgement with a score for each part. None: this one has no label."""
    return BETWEEN.join(UNKNOWN if label is None else str(label) for label in labels)


def read_parts(label: str) -> tuple[PartLabel | None, ...]:
    """What `join_parts` wrote. Raises ValueError for any other text."""
    return tuple(None if part == UNKNOWN else read_part(part, label) for part in label.split(BETWEEN))


def read_part(part: str, label: str) -> PartLabel:
    if not (match := PART_LABEL.fullmatch(part)):
        raise ValueError(f"reference {label[:80]!r} is not a label of a judgement")
    kind, score, low, high = match.groups()
    found = next(one for one in get_args(Kind) if one == kind)
    return PartLabel(found, float(score), None if low is None else (int(low), int(high)))


def read_grades(label: str) -> tuple[float, ...]:
    """Those of several responses; none of another label."""
    match = GRADED_LABEL.fullmatch(label)
    return tuple(map(float, match[1].split())) if match else ()


def num_scores(label: str) -> int:
    """The number of scores that a judgement gives under this label."""
    if grades := read_grades(label):
        return len(grades)
    return int(match[2]) if (match := BEST_LABEL.fullmatch(label)) else label.count(BETWEEN) + 1


def judged_right(scores: Sequence[float], label: str) -> bool:
    """Whether scores, in the order shown, agree with a label, each with its own if it has any. Raises ValueError for a
    label not made by this module.
    """
    if grades := read_grades(label):
        top = max(grades)
        best, others = (
            [s for s, grade in zip(scores, grades, strict=True) if (grade == top) is is_top] for is_top in (True, False)
        )
        return min(best) > max(others)
    if match := BEST_LABEL.fullmatch(label):
        first, count = int(match[1]) - 1, int(match[2])
        return len(scores) == count and all(scores[first] > s for i, s in enumerate(scores) if i != first)
    return all(part is None or part.is_met_by(score) for part, score in zip(read_parts(label), scores, strict=True))


def measure_agreement(scores: Sequence[float | None], label: str, scale: Scale) -> float:
    """How far scores agree with a label: RIGHT or WRONG. For a graded label between them: of a score by its distance,
    of several by the pairs that they order as the grades do, less those in opposite order (Kendall's tau over the pairs
    of different grades).

    Of several parts the mean. Parts with equal labels count as much together as those with any other: of steps nearly
    all are right, and a judge that calls every step right would earn nearly all.

    scores: None: what is written of this part can't be used, which is wrong.
    """
    if grades := read_grades(label):
        given = [score for score in scores if score is not None]
        pairs = [(i, j) for i, j in itertools.combinations(range(len(grades)), 2) if grades[i] != grades[j]]
        return fmean(float(np.sign((given[i] - given[j]) * (grades[i] - grades[j]))) for i, j in pairs)
    if BEST_LABEL.fullmatch(label):
        return RIGHT if judged_right([score for score in scores if score is not None], label) else WRONG
    by_label: dict[PartLabel, list[float]] = {}
    for part, score in zip(read_parts(label), scores, strict=True):
        if part is not None:
            by_label.setdefault(part, []).append(WRONG if score is None else part.measure(score, scale))
    return fmean(map(fmean, by_label.values()))


def describe_label(label: str) -> str:
    """The label in words, for a hint."""
    if match := BEST_LABEL.fullmatch(label):
        return f"The best response is: Response {match[1]}"
    if grades := read_grades(label):
        return f"The true grades are: {', '.join(f'{grade:g}' for grade in grades)}"
    parts = ["unknown" if part is None else describe_part(part) for part in read_parts(label)]
    return f"The true score{'s are' if len(parts) > 1 else ' is'}: {', '.join(parts)}"


def describe_part(label: PartLabel) -> str:
    return f"{label.score:g}" if label.kind in ("exactly", "graded") else f"{label.kind} {label.score:g}"
