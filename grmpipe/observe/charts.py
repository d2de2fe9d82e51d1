"""Curves as the geometry of an SVG: paths, ticks, labels. Pure; knows no run and no file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

WIDTH, HEIGHT = 560, 210
MARGINS = LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 22  # space for the labels of ticks
MAX_POINTS = 300  # of a curve: more than a screen can show
MAX_DOTS = 40  # a curve with fewer points shows each as a dot
NUM_TICKS = 4

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve in its own units. quiet: drawn thin, as a background for others."""

    name: str
    points: Sequence[Point]
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A series on the canvas. `dots`: x, y and label of each. value: the last value as text; for an area its mean."""

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
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    bands: Sequence[tuple[float, float]] = ()  # x, width: steps that are marked
    filled: bool = False  # curves are the upper edges of areas, the topmost first
    width: int = WIDTH
    height: int = HEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The mapping from units to the canvas."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    width: int = WIDTH
    height: int = HEIGHT
    margins: tuple[int, int, int, int] = MARGINS

    def x(self, value: float) -> float:
        left, right, _, _ = self.margins
        return left + (value - self.x_low) / (self.x_high - self.x_low) * (self.width - left - right)

    def y(self, value: float) -> float:
        _, _, top, bottom = self.margins
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return self.height - bottom - share * (self.height - top - bottom)


def chart(title: str, series: Sequence[Series], *, note: str = "", marked: Iterable[float] = ()) -> Chart | None:
    """A chart of series. marked: steps shown as bands. None if no series has a point."""
    drawn = [Series(name=one.name, points=thinned(one.points), quiet=one.quiet) for one in series if one.points]
    if not drawn:
        return None
    frame = framed([point for one in drawn for point in one.points])
    curves = [curve(one, frame) for one in drawn]
    return on_axes(title, note, frame, curves, bands=bands(sorted(set(marked)), frame))


def stacked(title: str, layers: Sequence[Series], *, note: str = "") -> Chart | None:
    """A chart of areas on top of each other, the first at the bottom. All layers have the same x. None for fewer than
    two points.
    """
    if not layers or len(layers[0].points) < 2:
        return None
    xs = [x for x, _ in layers[0].points]
    heights = [list(accumulate(ys)) for ys in zip(*([y for _, y in layer.points] for layer in layers), strict=True)]
    edges = [thinned([*zip(xs, edge, strict=True)]) for edge in zip(*heights, strict=True)]
    frame = framed([(xs[0], 0.0), *(point for edge in edges for point in edge)])
    floor = f"V{rounded(frame.y(0.0))}H{rounded(frame.x(edges[0][0][0]))}Z"
    areas = [
        Curve(
            name=layer.name,
            path=path_of(edge, frame) + floor,
            quiet=False,
            value=short(sum(y for _, y in layer.points) / len(layer.points)),
        )
        for edge, layer in zip(edges, layers, strict=True)
    ]
    return on_axes(title, note, frame, areas[::-1], filled=True)


def on_axes(
    title: str,
    note: str,
    frame: Frame,
    curves: Sequence[Curve],
    *,
    bands: Sequence[tuple[float, float]] = (),
    filled: bool = False,
) -> Chart:
    return Chart(
        title=title,
        note=note,
        curves=curves,
        x_ticks=[Tick(at=rounded(frame.x(value)), text=short(value)) for value in whole_ticks(frame)],
        y_ticks=[Tick(at=rounded(frame.y(value)), text=short(value)) for value in ticks(frame.y_low, frame.y_high)],
        bands=bands,
        filled=filled,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spark:
    """A curve the size of a word."""

    name: str
    path: str
    first: str
    last: str


SPARK_WIDTH, SPARK_HEIGHT = 120, 24


def spark(name: str, points: Sequence[Point]) -> Spark:
    points = thinned(points, SPARK_WIDTH)
    frame = framed(points, SPARK_WIDTH, SPARK_HEIGHT, (1, 1, 2, 2))
    return Spark(name=name, path=path_of(points, frame), first=short(points[0][1]), last=short(points[-1][1]))


# -- geometry --------------------------------------------------------------------------------------------------------


def framed(
    points: Sequence[Point],
    width: int = WIDTH,
    height: int = HEIGHT,
    margins: tuple[int, int, int, int] = MARGINS,
) -> Frame:
    """The frame around all points. A constant series also gets some height."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_low, x_high = widened(min(xs), max(xs))
    y_low, y_high = widened(min(ys), max(ys))
    return Frame(x_low=x_low, x_high=x_high, y_low=y_low, y_high=y_high, width=width, height=height, margins=margins)


def widened(low: float, high: float) -> Point:
    if high > low:
        return low, high
    room = abs(low) / 2
    return (low - room, high + room) if room else (0.0, 1.0)


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Points reduced to means of neighbours if there are too many; the last point is kept."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    means = [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
    return [*means[:-1], points[-1]]


def curve(series: Series, frame: Frame) -> Curve:
    dots = series.points if len(series.points) <= (1 if series.quiet else MAX_DOTS) else ()
    return Curve(
        name=series.name,
        path=path_of(series.points, frame),
        quiet=series.quiet,
        value=short(series.points[-1][1]),
        dots=[(rounded(frame.x(x)), rounded(frame.y(y)), f"step {short(x)}: {short(y)}") for x, y in dots],
    )


def path_of(points: Sequence[Point], frame: Frame) -> str:
    return "M" + "L".join(f"{rounded(frame.x(x))},{rounded(frame.y(y))}" for x, y in points)


def bands(steps: Sequence[float], frame: Frame) -> list[tuple[float, float]]:
    """One band per step, from half a step before it to half a step after it, within the frame."""
    found = []
    for step in steps:
        start = frame.x(max(frame.x_low, step - 0.5))
        end = frame.x(min(frame.x_high, step + 0.5))
        if end > start:
            found.append((rounded(start), max(1.0, rounded(end - start))))
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


def rounded(value: float) -> float:
    return round(value, 1)


def short(value: float) -> str:
    """A number with three significant digits; whole numbers stay whole."""
    if value == round(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3g}"
