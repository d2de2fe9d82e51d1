"""A row of numbers as a line of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """One character a value, on a fixed scale: [low, high]; what lies outside stands at its edge."""
    top = len(BARS) - 1
    return "".join(BARS[max(0, min(top, round((value - low) / (high - low) * top)))] for value in values)
