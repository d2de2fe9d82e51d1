"""Counts of the criteria of rubrics: how far they are met, whose judgement failed, which go together. Pure."""

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from grmpipe.counts import Counts
from grmpipe.judge.votes import MET
from grmpipe.types import JudgedCriterion, Metrics

MOST = 64  # names, and tags, that have metrics: the first ones
MOST_PAIRED = 16  # criteria of a verdict whose pairs are counted
FEWEST = 10  # verdicts that chance would give, before a pair is called contradicting
# Verdicts before a pair is called alike: none of them then says that less than 1 % differ (95 %, the rule of three). Of
# a pair of which one merely implies the other far fewer often happen to be alike.
FEWEST_ALIKE = 300


@dataclass(slots=True)
class CriterionCounts(Counts):
    """Of one criterion, or of all with a tag."""

    judged: int = 0
    failed: int = 0
    passed: int = 0  # met at least half
    met: float = 0.0  # sums over the judged
    squares: float = 0.0

    def add(self, met: float | None) -> None:
        if met is None:
            self.failed += 1
        else:
            self.judged += 1
            self.passed += met >= MET
            self.met += met
            self.squares += met * met

    def metrics(self) -> Metrics:
        found = {"failed_share": self.failed / (self.judged + self.failed)}
        if self.judged:
            mean = self.met / self.judged
            found |= {"met_mean": mean, "met_std": math.sqrt(max(0.0, self.squares / self.judged - mean * mean))}
        return found


@dataclass(slots=True)
class PairCounts(Counts):
    """Of the verdicts in which two shared criteria were judged: those that meet the first one, the second one, both."""

    judged: int = 0
    first: int = 0
    second: int = 0
    both: int = 0

    def describe_contradiction(self) -> str:
        """What is wrong with the pair, in words; empty: nothing that is known."""
        if not self.both and self.first * self.second >= FEWEST * self.judged:
            return f"are never met together ({self.first} and {self.second} of {self.judged} verdicts)"
        is_alike = self.first == self.second == self.both and self.judged >= FEWEST_ALIKE
        if is_alike and FEWEST <= self.both <= self.judged - FEWEST:
            return (
                f"were met by the same responses so far (both in {self.both} of {self.judged} verdicts, never one "
                "alone): they count twice what may be one thing, unless one only implies the other"
            )
        return ""


@dataclass(slots=True)
class RubricCounts(Counts):
    """By name only of criteria for all prompts: a prompt's own have names that no other prompt has."""

    by_name: dict[str, CriterionCounts] = field(default_factory=dict)
    by_tag: dict[str, CriterionCounts] = field(default_factory=dict)
    pairs: dict[str, PairCounts] = field(default_factory=dict)  # "<name>" and "<name>" -> counts

    def add(self, criteria: Collection[JudgedCriterion]) -> None:
        """Count a verdict."""
        for one in criteria:
            places = [(self.by_name, one.name)] * one.shared + [(self.by_tag, tag) for tag in one.tags]
            for counts, key in places:
                if key in counts or len(counts) < MOST:
                    counts.setdefault(key, CriterionCounts()).add(one.met)
        met = [(one.name, one.met >= MET) for one in criteria if one.shared and one.met is not None]
        for (first, a), (second, b) in itertools.combinations(met[:MOST_PAIRED], 2):
            pair = self.pairs.setdefault(f'"{first}" and "{second}"', PairCounts())
            pair.judged, pair.first, pair.second = pair.judged + 1, pair.first + a, pair.second + b
            pair.both += a and b

    def metrics(self) -> Metrics:
        named = (("criterion", self.by_name), ("tag", self.by_tag))
        return {
            f"{kind}/{spell_name(name)}/{key}": value
            for kind, counts in named
            for name, one in itertools.islice(counts.items(), MOST)
            for key, value in one.metrics().items()
        }

    def describe(self) -> str:
        """How far the criteria for all prompts are met, and all with a tag; empty without any."""
        named = [*self.by_name.items(), *((f"[{tag}]", one) for tag, one in self.by_tag.items())]
        found = [
            f"{name} {f'{one.met / one.judged:.2f}' if one.judged else '-'}"
            + f" ({one.failed} failed)" * (one.failed > 0)
            for name, one in named
        ]
        return f"criteria, how far met: {', '.join(found)}" if found else ""

    def list_passed(self) -> Iterator[str]:
        """The criteria that all verdicts met."""
        return (name for name, one in self.by_name.items() if one.judged and one.passed == one.judged)

    def find_contradictions(self) -> Mapping[str, str]:
        """Pair -> what is wrong with it."""
        return {pair: words for pair, one in self.pairs.items() if (words := one.describe_contradiction())}


def spell_name(name: str) -> str:
    """A name as a part of a metric's."""
    return re.sub(r"[^\w.:-]+", "_", name).strip("_")[:MOST]
