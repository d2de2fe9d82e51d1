"""Admission: its pace by the formula's numbers, and its reserved places. test_group_buffer.py tests any order of
events.
"""

from __future__ import annotations

from collections import Counter

import pytest

from scheduler.admission import Admission, Ledger


def test_capacity_follows_the_published_formula() -> None:
    """B = 4, eta = 1: 8 slots at version 0; 12 in all after version 1 (arXiv 2505.24298)."""
    rule = Admission(groups_per_batch=4, max_staleness=1, last_version=100)
    assert rule.capacity(version=0, num_in_flight=0) == 8
    assert rule.capacity(version=0, num_in_flight=8) == 0
    assert rule.capacity(version=1, num_in_flight=4) == 4  # 4 are trained, 4 in flight


def test_nothing_is_opened_that_no_step_would_train() -> None:
    rule = Admission(groups_per_batch=4, max_staleness=3, last_version=2)
    assert rule.capacity(version=0, num_in_flight=0) == 8
    assert rule.capacity(version=2, num_in_flight=0) == 0


def test_tokens_are_stale_when_more_versions_lie_between_than_the_bound() -> None:
    rule = Admission(groups_per_batch=4, max_staleness=1, last_version=100)
    assert not rule.is_stale(9, version=10)
    assert rule.is_stale(8, version=10)


def test_places_are_reserved_for_groups_that_would_be_too_old_for_the_next_batch() -> None:
    """Batches of 2: two groups of version 0 are due at version 1, so two of version 1 wait; one goes when there is only
    one.
    """
    rule = Admission(groups_per_batch=2, max_staleness=1, last_version=9)
    assert not rule.may_take(1, version=1, num_taken=0, waiting={0: 2, 1: 2})
    assert rule.may_take(0, version=1, num_taken=0, waiting={0: 2, 1: 2})
    assert rule.may_take(1, version=1, num_taken=0, waiting={0: 1, 1: 2})
    assert not rule.may_take(1, version=1, num_taken=1, waiting={0: 1, 1: 1})


def test_a_place_is_kept_for_what_is_due_two_batches_ahead() -> None:
    """Two of version 0 and batches of one: taking a young one now would leave two for a single last batch."""
    rule = Admission(groups_per_batch=1, max_staleness=2, last_version=9)
    assert not rule.may_take(1, version=1, num_taken=0, waiting={0: 2, 1: 1})
    assert rule.may_take(0, version=1, num_taken=0, waiting={0: 2, 1: 1})


def test_a_group_overdue_by_its_opening_has_a_place_before_all_others() -> None:
    """Its tokens may be younger than its opening."""
    rule = Admission(groups_per_batch=1, max_staleness=1, last_version=9)
    assert rule.may_take(1, version=3, num_taken=0, waiting={1: 1, 3: 1})
    assert not rule.may_take(3, version=3, num_taken=0, waiting={1: 1, 3: 1})


def test_a_lost_group_is_noticed() -> None:
    Ledger(submitted=6, trained=4, dropped=Counter(stale=1), in_flight=1)
    with pytest.raises(AssertionError, match="submitted 6"):
        Ledger(submitted=6, trained=4, dropped=Counter(stale=1), in_flight=0)
