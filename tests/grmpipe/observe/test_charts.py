"""Charts: the places of points, the ticks, and that an empty series draws nothing."""

from __future__ import annotations

import re

import pytest

from grmpipe.observe.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    chart,
    short,
    thin_points,
    ticks,
)


def points_of(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path)]


def test_the_ends_of_a_curve_lie_on_the_frame_and_higher_is_higher() -> None:
    drawn = chart("score", [Series(name="held-out", points=[(0, 1.0), (10, 9.0)])])
    assert drawn is not None
    assert points_of(drawn.curves[0].path) == [(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, TOP)]


def test_chart_without_points_is_none_and_an_empty_series_is_left_out() -> None:
    assert chart("score", [Series(name="held-out", points=[])]) is None
    drawn = chart("score", [Series(name="held-out", points=[]), Series(name="batches", points=[(1, 1.0)])])
    assert drawn is not None
    assert [curve.name for curve in drawn.curves] == ["batches"]


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-9, 1e9])
def test_what_does_not_vary_is_drawn_within_the_frame(value: float) -> None:
    drawn = chart("flat", [Series(name="one", points=[(5, value), (6, value)])])
    assert drawn is not None
    assert all(TOP <= y <= HEIGHT - BOTTOM for _, y in points_of(drawn.curves[0].path))


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 1, [0, 0.5, 1]), (0.2, 0.9, [0.2, 0.4, 0.6, 0.8]), (0, 80, [0, 20, 40, 60, 80])]
)
def test_ticks_are_round_numbers_within(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_there_are_no_ticks_between_two_steps() -> None:
    drawn = chart("score", [Series(name="batches", points=[(1, 1.0), (2, 2.0)])])
    assert drawn is not None
    assert [text for _, text in drawn.x_ticks] == ["1", "2"]


def test_marked_steps_become_bands_and_none_lies_outside() -> None:
    drawn = chart("score", [Series(name="held-out", points=[(0, 1.0), (10, 2.0)])], marked=[5, 10, 99])
    assert drawn is not None
    assert len(drawn.bands) == 2
    assert all(x >= LEFT and x + width <= WIDTH - RIGHT + 0.1 for x, width in drawn.bands)


def test_many_points_become_means_of_neighbours_and_the_last_one_stays() -> None:
    few = thin_points([(float(x), float(x % 2)) for x in range(10 * MAX_POINTS)])
    assert len(few) <= MAX_POINTS
    assert few[0] == (4.5, 0.5)
    assert few[-1] == (10 * MAX_POINTS - 1, 1.0)


def test_numbers_are_short() -> None:
    assert [short(value) for value in (80.0, 0.0012345, 8.4609, 123456.7)] == ["80", "0.00123", "8.46", "1.23e+05"]
