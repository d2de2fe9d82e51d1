"""Compositions within compositions give every sibling what a plain recursion over the whole group gives it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from grmpipe.judge.composition.cascade import Audit
from grmpipe.types import Failed

SIZE = 4
GROUP = "g000000"
JUDGES = ("a", "b", "c", "d", "list")
VALUES = (0.0, 0.3, 0.5, 0.8, 1.0)
CAUSES = ("refused", "undecided", "unparseable")
Rewards = dict[int, float | str]  # sibling -> its reward, or the cause of its failure

CASCADE = {"kind": "cascade", "unsure_band": [0.4, 0.6], "audit_share": 0.4}
# kind -> how two names become a composition
KINDS: dict[str, Any] = {
    "mix": lambda one, two: {"kind": "mix", "mix": {one: 1, two: 3}},
    "jury": lambda one, two: {"kind": "jury", "members": [one, two, "d"], "quorum": 1, "vote": "min"},
    "gate": lambda one, two: {"kind": "gate", "gate": one, "inner": two, "floor": 0.1},
    "cascade": lambda one, two: {**CASCADE, "first": one, "then": two, "share": 1.0},
    "bounded": lambda one, two: {**CASCADE, "first": one, "then": two, "share": 0.5},
    "by_rollout": lambda one, two: {**CASCADE, "first": one, "then": two, "share": 1.0, "escalate": "rollout"},
    "route": lambda one, two: {"kind": "route", "route": {"math": one}, "default": two},
}


@dataclass(frozen=True)
class Plain:
    """The rewards of a group, by recursion over the parts: each part is given the siblings that come as far as it."""

    rewards: Mapping[str, Mapping[str, Any]]
    table: Mapping[str, Sequence[float | str]]  # judge -> what it gives the siblings
    source: str

    def of(self, name: str, siblings: Sequence[int]) -> Rewards:
        if name in self.table:
            return {sibling: self.table[name][sibling] for sibling in siblings}
        part = self.rewards[name]
        return getattr(self, part["kind"])(name, part, siblings)

    def mix(self, name: str, part: Mapping[str, Any], siblings: Sequence[int]) -> Rewards:
        given = [self.of(inner, siblings) for inner in part["mix"]]
        weights = list(part["mix"].values())

        def one(sibling: int) -> float | str:
            mine = [column[sibling] for column in given]
            failed = [reward for reward in mine if isinstance(reward, str)]
            return failed[0] if failed else sum(w * r for w, r in zip(weights, mine, strict=True)) / sum(weights)

        return {sibling: one(sibling) for sibling in siblings}

    def jury(self, name: str, part: Mapping[str, Any], siblings: Sequence[int]) -> Rewards:
        """The lowest reward of the largest set of members that leaves most siblings with a verdict."""
        given = {inner: self.of(inner, siblings) for inner in part["members"]}
        choices = [
            chosen
            for count in range(len(given), part["quorum"] - 1, -1)
            for chosen in itertools.combinations(part["members"], count)
        ]

        def judged(chosen: Sequence[str]) -> list[int]:
            return [one for one in siblings if not any(isinstance(given[name][one], str) for name in chosen)]

        best = max(choices, key=lambda chosen: len(judged(chosen)))
        found: Rewards = {}
        for sibling in siblings:
            mine = [given[name][sibling] for name in best]
            failed = [reward for reward in mine if isinstance(reward, str)]
            found[sibling] = failed[0] if failed else min(mine)
        return found

    def gate(self, name: str, part: Mapping[str, Any], siblings: Sequence[int]) -> Rewards:
        found = self.of(part["gate"], siblings)
        passing = [one for one, reward in found.items() if not isinstance(reward, str) and reward >= 0.5 - 1e-9]
        inner = self.of(part["inner"], passing)
        return {one: inner.get(one, reward if isinstance(reward, str) else 0.1) for one, reward in found.items()}

    def cascade(self, name: str, part: Mapping[str, Any], siblings: Sequence[int]) -> Rewards:
        first = self.of(part["first"], siblings)
        if not siblings:
            return {}
        together = part.get("escalate") != "rollout"
        chosen: list[int] = []
        for members in [siblings] if together else [[one] for one in siblings]:
            given = [first[one] for one in members]
            unsure = any(one == "undecided" if isinstance(one, str) else 0.4 <= round(one, 9) <= 0.6 for one in given)
            valid = any(not isinstance(one, str) for one in given)
            drawn_for = GROUP if together else f"{GROUP}/{members[0]}"
            audited = not unsure and valid and Audit(share=0.4, seed=0).takes(name, drawn_for)
            if (unsure and part["share"] == 1.0) or audited:  # half a share is too little for a first group
                chosen += members
        return {**first, **self.of(part["then"], chosen)}

    def route(self, name: str, part: Mapping[str, Any], siblings: Sequence[int]) -> Rewards:
        return self.of(part["route"].get(self.source, part["default"]), siblings)


def nestings(depth: int) -> Iterator[tuple[str, ...]]:
    """Every chain of compositions, each in one of two places of the one before it: kind, place, kind, .."""
    for kinds in itertools.product(KINDS, repeat=depth):
        for places in itertools.product((0, 1), repeat=depth - 1):
            yield tuple(itertools.chain(*zip(kinds, map(str, (*places, 0)), strict=True)))[:-1]


def sections(nesting: Sequence[str], draw: random.Random) -> dict[str, dict[str, Any]]:
    """The compositions of a chain, the first one under the name `reward`."""
    kinds, places = nesting[::2], nesting[1::2]
    names = ["reward", *(f"inner{level}" for level in range(1, len(kinds)))]
    found = {}
    for level, kind in enumerate(kinds):
        one, two = draw.sample(("a", "b", "c", "list"), 2)
        if level + 1 < len(kinds):
            one, two = (names[level + 1], two) if places[level] == "0" else (one, names[level + 1])
        found[names[level]] = KINDS[kind](one, two)
    return found


def check(group_bench: Any, nesting: Sequence[str], seed: int) -> None:
    draw = random.Random(f"{nesting} {seed}")
    built = sections(nesting, draw)
    table = {
        name: [draw.choice(CAUSES) if draw.random() < 0.15 else draw.choice(VALUES) for _ in range(SIZE)]
        for name in JUDGES
    }
    source = draw.choice(("math", "chat"))

    def given(row: Sequence[float | str]) -> Any:
        return lambda group, sibling: (
            Failed(stage="judge", cause=row[sibling], attempts=1, detail="?")  # type: ignore[arg-type]
            if isinstance(row[sibling], str)
            else row[sibling]
        )

    judges = {name: given(row) for name, row in table.items()}
    nested = {name: one for name, one in built.items() if name != "reward"}
    composed = group_bench.composed(built["reward"], judges, rewards=nested, delays=seed)
    found = composed.reports(SIZE, group_id=GROUP, order=seed, source=source)
    expected = Plain(built, table, source).of("reward", range(SIZE))
    rounded = {one: reward if isinstance(reward, str) else round(reward, 9) for one, reward in expected.items()}
    assert {one: group_bench.outcome_of(report) for one, report in found.items()} == rounded


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_every_nesting_of_two_is_its_plain_recursion(group_bench: Any, depth: int, seed: int) -> None:
    for nesting in nestings(depth):
        check(group_bench, nesting, seed)


def test_nestings_of_three_are_their_plain_recursion(group_bench: Any) -> None:
    for number, nesting in enumerate(nestings(3)):
        if number % 10 == 0:
            check(group_bench, nesting, number)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_every_nesting_of_three_is_its_plain_recursion(group_bench: Any, seed: int) -> None:
    for nesting in nestings(3):
        check(group_bench, nesting, seed)
