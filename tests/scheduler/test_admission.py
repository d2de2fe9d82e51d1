"""Admission: its pace by the formula's numbers, and its reserved places. test_group_buffer.py tests any order of
events.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from grmpipe.scheduler.admission import Admission, AdmissionPace, Ledger


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


def test_the_end_of_a_batch_makes_room_where_capacity_grows_by_more_than_was_trained() -> None:
    for last_version, max_staleness, version in itertools.product((1, 2, 5), (0, 1, 3), range(4)):
        rule = Admission(groups_per_batch=4, max_staleness=max_staleness, last_version=last_version)
        grows = rule.capacity(version + 1, num_in_flight=8 - 4) > rule.capacity(version, num_in_flight=8)
        assert rule.makes_room(version) == grows, (last_version, max_staleness, version)


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


def test_each_batch_up_to_the_last_one_adds_its_places() -> None:
    """Batches of 2 at version 3, one place taken: of those due now and in the next batch three fit."""
    rule = Admission(groups_per_batch=2, max_staleness=3, last_version=9)
    assert rule.may_take(3, version=3, num_taken=0, waiting={0: 1, 1: 2, 3: 1})
    assert not rule.may_take(3, version=3, num_taken=0, waiting={0: 1, 1: 3, 3: 1})


def test_a_group_overdue_by_its_opening_has_a_place_before_all_others() -> None:
    """Its tokens may be younger than its opening."""
    rule = Admission(groups_per_batch=1, max_staleness=1, last_version=9)
    assert rule.may_take(1, version=3, num_taken=0, waiting={1: 1, 3: 1})
    assert not rule.may_take(3, version=3, num_taken=0, waiting={1: 1, 3: 1})


def test_a_lost_group_is_noticed() -> None:
    Ledger(submitted=6, trained=4, dropped=Counter(stale=1), in_flight=1)
    with pytest.raises(AssertionError, match="submitted 6"):
        Ledger(submitted=6, trained=4, dropped=Counter(stale=1), in_flight=0)


def pace_after(steps_s: list[float], max_staleness: int = 1) -> AdmissionPace:
    """The pace of batches of 4 groups at the end of these steps, the last of which ends at 100 s."""
    pace = AdmissionPace(groups_per_batch=4, max_staleness=max_staleness)
    for number, step_s in enumerate(steps_s, 1):
        pace.step_ended(100.0 - sum(steps_s[number:]), step_s)
    return pace


def test_a_batch_that_follows_too_closely_in_each_cycle_is_held_for_the_rest_of_a_mean_step() -> None:
    assert pace_after([3.0, 1.0] * 3).wait_s(100.0, capacity=4, num_open=4) == pytest.approx(0.95 * 2.0 - 1.0)
    assert pace_after([4.0, 1.0, 1.0] * 3, 2).wait_s(100.0, capacity=4, num_open=8) == pytest.approx(0.95 * 2.0 - 1.0)
    assert pace_after([9.0] * 4 + [3.0, 1.0] * 3).wait_s(100.0, capacity=4, num_open=4) == pytest.approx(0.9)
    assert pace_after([3.0, 1.0] * 3).wait_s(101.0, capacity=4, num_open=4) == 0.0


@pytest.mark.parametrize(
    ("steps_s", "max_staleness"),
    [
        ([], 1),
        ([3.0, 1.0] * 2, 1),  # too few to know
        ([2.0, 2.0, *[3.0, 1.0] * 2], 1),  # not close in the first cycle
        ([1.0, 3.0] * 3, 1),  # the close one is the other one
        ([3.0, 1.0, 1.0, 3.0, 3.0, 1.0], 1),  # random lengths
        ([2.0] * 6, 1),
        ([3.0, 1.0, 6.0, 1.0, 3.0, 1.0], 1),  # cycles that differ
        ([*[3.0, 1.0] * 2, 6.0, 1.0], 1),
        ([3.0, 1.0, 4.0, 1.0, 3.0, 1.0], 1),  # by a quarter, the least that is too much
        ([3.0, 1.0] * 3, 0),
        ([60.0, 0.8, *[0.8] * 4], 1),  # one that waited for an engine's replacement says nothing about the others
    ],
)
def test_no_batch_is_held_for_one_close_follower_or_a_single_long_step(
    steps_s: list[float], max_staleness: int
) -> None:
    assert pace_after(steps_s, max_staleness).wait_s(100.0, capacity=4, num_open=4) == 0.0


def test_batches_that_became_ready_while_the_learner_was_away_are_followed_one_headway_apart() -> None:
    pace = pace_after([2.0] * 6)
    waits_s = []
    for now_s in (130.25, 130.5, 134.5, 136.5, 137.5):  # an evaluation of 30 s; two batches are ready at its end
        pace.step_ended(now_s, {130.25: 0.25, 130.5: 0.25, 134.5: 4.0, 136.5: 2.0, 137.5: 1.0}[now_s])
        waits_s.append(pace.wait_s(now_s, capacity=4, num_open=4))
    assert waits_s == [0.0, pytest.approx(0.95 * 2.0 - 0.25), 0.0, 0.0, 0.0]


def test_a_held_batch_opens_as_groups_of_the_batch_before_end_and_replacements_open_at_once() -> None:
    pace = pace_after([3.0, 1.0] * 3)
    assert pace.wait_s(100.0, capacity=4, num_open=3) == 0.0
    assert pace.wait_s(100.0, capacity=5, num_open=4) == 0.0
    assert pace.wait_s(100.0, capacity=1, num_open=3) == 0.0
    assert pace.wait_s(200.0, capacity=0, num_open=3) == math.inf
