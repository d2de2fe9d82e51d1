"""Counts add up by field and by name, share nothing with their sum, and outlive a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from grmpipe.counts import Counts


@dataclass(slots=True)
class Inner(Counts):
    number: int = 0
    causes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Outer(Counts):
    seconds: float = 0.0
    by_name: dict[str, Inner] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)


ONE = Outer(seconds=0.5, by_name={"a": Inner(number=1, causes=Counter(died=1))}, times_s=[0.5])
OTHER = Outer(
    seconds=1.0, by_name={"a": Inner(number=2, causes=Counter(refused=3)), "b": Inner(number=4)}, times_s=[1.0]
)


def test_counts_add_up_and_a_list_is_of_one_step() -> None:
    total = Outer() + ONE + OTHER
    assert total.by_name == {"a": Inner(number=3, causes=Counter(died=1, refused=3)), "b": Inner(number=4)}
    assert (total.seconds, total.times_s, (ONE + OTHER).times_s) == (1.5, [], [0.5])


def test_a_sum_shares_no_counts_with_its_parts() -> None:
    total = Outer() + OTHER
    total.by_name["b"].number += 1
    total.by_name["a"].causes["refused"] += 1
    assert (OTHER.by_name["b"].number, OTHER.by_name["a"].causes["refused"]) == (4, 3)


def test_saved_counts_are_json_and_are_restored_without_lists() -> None:
    restored = Outer.restore(json.loads(json.dumps(ONE.to_dict())))
    assert restored == Outer() + ONE
    assert Outer.restore({}) == Outer()
