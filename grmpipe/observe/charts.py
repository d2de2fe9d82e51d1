"""Curves as the geometry of an SVG: paths, ticks, labels. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 22  # space for the labels of ticks
MAX_POINTS = 300  # in a curve: more than a screen can show
MAX_DOTS = 40  # a curve with fewer points shows each as a dot
SMALLEST_RANGE = 1e-300  # on an axis, so that its steps aren't 0
NUM_TICKS = 4

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve in its own units. quiet: drawn thin, as a background for others."""

    name: str
    points: Sequence[Point]
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A series on the canvas. `dots`: x, y and label of each. value: the last value as text."""

    name: str
    path: str
    quiet: bool
    value: str
    dots: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    note: str
    curves: Sequence[Curve]
    x_ticks: Sequence[tuple[float, str]]  # place, label
    y_ticks: Sequence[tuple[float, str]]
    bands: Sequence[tuple[float, float]] = ()  # x, width: steps that are marked
    width: int = WIDTH
    height: int = HEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The mapping from units to the canvas."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def chart(title: str, series: Sequence[Series], *, note: str = "", marked: Iterable[float] = ()) -> Chart | None:
    """A chart of series. marked: steps shown as bands. None if no series has a point."""
    drawn = [Series(name=one.name, points=thin_points(one.points), quiet=one.quiet) for one in series if one.points]
    if not drawn:
        return None
    frame = frame_points([point for one in drawn for point in one.points])
    return Chart(
        title=title,
        note=note,
        curves=[curve(one, frame) for one in drawn],
        x_ticks=[(round_tenth(frame.x(value)), short(value)) for value in whole_ticks(frame)],
        y_ticks=[(round_tenth(frame.y(value)), short(value)) for value in ticks(frame.y_low, frame.y_high)],
        bands=bands(sorted(set(marked)), frame),
    )


# -- geometry --------------------------------------------------------------------------------------------------------


def frame_points(points: Sequence[Point]) -> Frame:
    """The frame around all points. A constant series also gets some height."""
    x_low, x_high = widen_range([x for x, _ in points])
    y_low, y_high = widen_range([y for _, y in points])
    return Frame(x_low=x_low, x_high=x_high, y_low=y_low, y_high=y_high)


def widen_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low > SMALLEST_RANGE:
        return low, high
    room = abs(low) / 2
    return (low - room, high + room) if room > SMALLEST_RANGE else (0.0, 1.0)


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Points reduced to means of neighbours if there are too many; the last point is kept."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(len(points) / MAX_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    means = [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
    return [*means[:-1], points[-1]]


def curve(series: Series, frame: Frame) -> Curve:
    dots = series.points if len(series.points) <= (1 if series.quiet else MAX_DOTS) else ()
    return Curve(
        name=series.name,
        path=draw_path(series.points, frame),
        quiet=series.quiet,
        value=short(series.points[-1][1]),
        dots=[(round_tenth(frame.x(x)), round_tenth(frame.y(y)), f"step {short(x)}: {short(y)}") for x, y in dots],
    )


def draw_path(points: Sequence[Point], frame: Frame) -> str:
    return "M" + "L".join(f"{round_tenth(frame.x(x))},{round_tenth(frame.y(y))}" for x, y in points)


def bands(steps: Sequence[float], frame: Frame) -> list[tuple[float, float]]:
    """One band per step, from half a step before it to half a step after it, within the frame."""
    found = []
    for step in steps:
        start = frame.x(max(frame.x_low, step - 0.5))
        end = frame.x(min(frame.x_high, step + 0.5))
        if end > start:
            found.append((round_tenth(start), max(1.0, round_tenth(end - start))))
    return found


def ticks(low: float, high: float) -> list[float]:
    """About NUM_TICKS round numbers within the range."""
    rough = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def whole_ticks(frame: Frame) -> list[float]:
    """Ticks of steps: whole numbers only."""
    return [value for value in ticks(frame.x_low, frame.x_high) if abs(value - round(value)) < 1e-9]


def round_tenth(value: float) -> float:
    return round(value, 1)


def short(value: float) -> str:
    """A number with three significant digits; whole numbers stay whole."""
    if value == round(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3g}"
