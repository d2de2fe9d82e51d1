"""What ended requests say about those in flight."""

from __future__ import annotations

import pytest

from grmpipe.scheduler.routing.load import RateEstimator


def test_remaining_length_of_a_request_is_estimated_from_longer_ones() -> None:
    rates = RateEstimator()
    for tokens in [10] * 100 + [100] * 100 + [200] * 100:
        rates.record_end(tokens)
    mean = rates.mean(0.0)
    assert mean == pytest.approx(310 / 3)
    assert rates.estimate_remaining(0, mean) == pytest.approx(mean)
    assert rates.estimate_remaining(50, mean) == pytest.approx(100, rel=0.01)
    assert rates.estimate_remaining(150, mean) == pytest.approx(50, rel=0.05)


def test_one_that_is_longer_than_all_is_not_taken_to_end_at_once() -> None:
    rates = RateEstimator()
    for _ in range(100):
        rates.record_end(10)
    assert rates.estimate_remaining(1000, rates.mean(0.0)) == pytest.approx(10)


def test_the_first_to_end_are_the_short_ones_and_the_mean_knows_it() -> None:
    rates = RateEstimator()
    rates.record_end(10)
    assert rates.mean(63 * 10.0) == 640


def test_before_any_has_ended_a_length_is_assumed() -> None:
    rates = RateEstimator(expected_tokens=64)
    assert rates.estimate_remaining(60, rates.mean(60.0)) == 64


def test_batches_of_many_sizes_tell_the_step_from_its_rows() -> None:
    rates = RateEstimator()
    for rows in [1, 4, 16, 64] * 20:
        rates.record_speed(101, 100 * (0.01 + 0.002 * rows), rows)
    step_s, row_s = rates.step()
    assert step_s == pytest.approx(0.01, rel=0.1)
    assert row_s == pytest.approx(0.002, rel=0.1)


def test_batches_of_one_size_tell_their_own_time_right() -> None:
    rates = RateEstimator()
    for _ in range(10):
        rates.record_speed(11, 10 * 0.5, 8.0)
    step_s, row_s = rates.step()
    assert step_s + 8 * row_s == pytest.approx(0.5)
    assert min(step_s, row_s) > 0


def test_the_cost_of_taking_over_a_request_is_measured_where_none_waited_for_a_row() -> None:
    rates = RateEstimator()
    assert rates.takeover_s(64) == 0.0
    for seconds, in_hand in [(0.1, 10), (0.3, 64), (9.0, 65)]:
        rates.took_over(seconds, in_hand)
    assert rates.takeover_s(64) == pytest.approx(0.2)


def test_a_request_of_one_token_tells_nothing_of_the_pace() -> None:
    rates = RateEstimator()
    rates.record_speed(1, 0.5, 8.0)
    assert rates.step() == RateEstimator().step()


def test_an_estimate_that_was_asked_for_follows_the_next_measurement() -> None:
    rates = RateEstimator()
    rates.record_speed(11, seconds=1.0, rows=4)
    before = rates.step(), rates.step_now_s
    rates.record_speed(11, seconds=3.0, rows=4)
    assert rates.step()[0] > before[0][0]
    assert rates.step_now_s == pytest.approx(2 * before[1])
