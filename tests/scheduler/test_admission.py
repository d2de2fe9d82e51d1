"""Admission paces and never strands: the formula's numbers, and any order of events."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.admission import Admission


def test_capacity_follows_the_published_formula() -> None:
    """B = 4, eta = 1: 8 slots at version 0; 12 in all after version 1 (arXiv 2505.24298)."""
    ledger = Admission(groups_per_batch=4, max_staleness=1, last_version=100)
    assert ledger.capacity == 8
    for n in range(8):
        ledger.open(f"g{n}")
    assert ledger.capacity == 0
    ledger.stepped([f"g{n}" for n in range(4)])
    assert ledger.capacity == 4
    assert ledger.submitted + ledger.capacity == 12


def test_a_dropped_group_makes_room_for_another() -> None:
    ledger = Admission(groups_per_batch=2, max_staleness=0, last_version=9)
    ledger.open("a")
    ledger.open("b")
    assert ledger.capacity == 0
    ledger.drop("a", "stale")
    assert ledger.capacity == 1
    ledger.check()


def test_nothing_is_opened_that_no_step_would_train() -> None:
    ledger = Admission(groups_per_batch=4, max_staleness=3, last_version=2)
    assert ledger.capacity == 8


def test_after_a_recovery_there_is_no_burst() -> None:
    ledger = Admission(groups_per_batch=4, max_staleness=1, last_version=100, version=10, dropped={"stale": 3})
    assert (ledger.trained, ledger.submitted, ledger.capacity) == (40, 43, 8)
    ledger.open("old", version=9)
    assert not ledger.is_stale(9)
    assert ledger.is_stale(8)
    ledger.check()


def test_places_are_reserved_for_groups_that_would_be_too_old_for_the_next_batch() -> None:
    ledger = Admission(groups_per_batch=2, max_staleness=1, last_version=9)
    for name in "abcd":
        ledger.open(name)
    ledger.stepped(["a", "b"])
    ledger.open("e")
    ledger.open("f")
    for name in "ef":
        ledger.ready(name)
    assert ledger.take() is None, "c and d are due now"
    assert ledger.may_take("c")
    ledger.drop("d", "rollout_timeout")
    assert ledger.take() == "e", "one place is free, c has the other"
    assert ledger.take() is None
    ledger.ready("c")
    assert ledger.take() == "c"


def test_a_place_is_kept_for_what_is_due_two_batches_ahead() -> None:
    """Three of version 0 and batches of one: a young one now would leave two for a single last batch."""
    ledger = Admission(groups_per_batch=1, max_staleness=2, last_version=9)
    for name in "abc":
        ledger.open(name)
    ledger.stepped(["a"])
    ledger.open("young")
    assert not ledger.may_take("young")
    assert ledger.may_take("b")


def test_a_lost_group_is_noticed() -> None:
    ledger = Admission(groups_per_batch=2, max_staleness=0, last_version=9)
    ledger.open("a")
    ledger.in_flight.clear()
    with pytest.raises(AssertionError, match="submitted 1"):
        ledger.check()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_any_order_of_ends_fills_every_batch_within_the_bound(batch: int, staleness: int, seed: int) -> None:
    """Groups end in any order, some are dropped; the learner takes only what `take` gives it, which is what a look at
    all that are ready would give."""
    rng = random.Random(seed)
    ledger = Admission(groups_per_batch=batch, max_staleness=staleness, last_version=12)
    opened: dict[str, int] = {}
    ready: list[str] = []
    taken: list[str] = []
    count = 0
    while ledger.version < 12:
        while ledger.capacity > 0:
            ledger.open(f"g{count}")
            opened[f"g{count}"] = ledger.version
            count += 1
        waiting = [g for g in ledger.in_flight if g not in ready and g not in taken]
        if waiting and rng.random() < 0.7:
            group = rng.choice(waiting)
            if rng.random() < 0.1:
                ledger.drop(group, "failed")
            else:
                ready.append(group)
                ledger.ready(group)
        if ready and rng.random() < 0.05:
            ledger.drop(gone := rng.choice(ready), "stale")
            ready.remove(gone)
        assert not any(ledger.is_stale(opened[group]) for group in ready), "reserved places: nothing grows stale"
        while len(taken) < batch:
            expected = most_urgent(ledger, ready, taken)
            assert ledger.take() == expected
            if expected is None:
                break
            ready.remove(expected)
            taken.append(expected)
        assert len(taken) == batch or not any(ledger.may_take(group) for group in ready), "no place left idle"
        if len(taken) == batch:
            assert all(ledger.version - opened[group] <= staleness for group in taken)
            ledger.stepped(taken)
            taken = []
        ledger.check()
    assert ledger.trained == 12 * batch


def most_urgent(ledger: Admission, ready: Sequence[str], taken: Collection[str]) -> str | None:
    """The rule, looked up group by group."""
    due = {group: version + ledger.max_staleness for group, version in ledger.in_flight.items()}
    first = min(ready, key=due.__getitem__, default=None)
    if first is None:
        return None
    waiting = Counter(when for group, when in due.items() if group not in taken and group != first)
    for version in range(ledger.version, due[first]):
        places = (version - ledger.version + 1) * ledger.groups_per_batch - len(taken) - 1
        if sum(count for when, count in waiting.items() if when <= version) > places:
            return None
    return first
