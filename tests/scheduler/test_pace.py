"""What ended requests tell of those in flight."""

from __future__ import annotations

import pytest

from scheduler.pace import Pace


def test_what_a_request_has_left_is_the_mean_of_the_longer_ones() -> None:
    pace = Pace()
    for tokens in (10, 10, 10, 100, 200):
        pace.ended(tokens)
    assert pace.remaining(0) == pytest.approx(66)
    assert pace.remaining(10) == pytest.approx(140)
    assert pace.remaining(150) == pytest.approx(50)
    assert pace.remaining(1000) == 1.0


def test_before_any_has_ended_a_length_is_assumed() -> None:
    assert Pace(expected_tokens=64).remaining(60) == 4
    assert Pace(expected_tokens=64).remaining(640) == 1


def test_batches_of_many_sizes_tell_the_step_from_its_rows() -> None:
    pace = Pace()
    for rows in [1, 4, 16, 64] * 20:
        pace.sampled(101, 100 * (0.01 + 0.002 * rows), rows)
    step_s, row_s = pace.step()
    assert step_s == pytest.approx(0.01, rel=0.1)
    assert row_s == pytest.approx(0.002, rel=0.1)


def test_batches_of_one_size_tell_their_own_time_right() -> None:
    pace = Pace()
    for _ in range(10):
        pace.sampled(11, 10 * 0.5, 8.0)
    step_s, row_s = pace.step()
    assert step_s + 8 * row_s == pytest.approx(0.5)
    assert min(step_s, row_s) > 0


def test_a_request_of_one_token_tells_nothing_of_the_pace() -> None:
    pace = Pace()
    pace.sampled(1, 0.5, 8.0)
    assert pace.step() == Pace().step()
