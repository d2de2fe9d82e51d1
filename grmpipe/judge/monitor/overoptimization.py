"""Score as a function of the distance from the reference, and where it will peak (arXiv 2210.10760). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_POINTS = 8
FARTHEST = 1e6  # a peak beyond it is no prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """R(d) = d (alpha - beta ln d), d = sqrt(KL) in nats of a whole response: the form for RL."""

    alpha: float
    beta: float

    @property
    def peak(self) -> float | None:
        """The d of the highest score, exp(alpha / beta - 1). None if the curve doesn't bend down."""
        if self.beta <= 0 or self.alpha / self.beta - 1 > math.log(FARTHEST):
            return None
        return math.exp(self.alpha / self.beta - 1)

    def at(self, d: float) -> float:
        return d * (self.alpha - self.beta * math.log(d))


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """Least squares over points (d, gain of the score since d was 0). None if there are fewer than FEWEST_POINTS, or
    all are at one d.
    """
    used = [(d, gain) for d, gain in points if d > 0 and math.isfinite(d) and math.isfinite(gain)]
    if len(used) < FEWEST_POINTS:
        return None
    columns = [(d, -d * math.log(d), gain) for d, gain in used]
    aa, ab, bb = (math.fsum(x * y for x, y in pairs) for pairs in (
        [(a, a) for a, _, _ in columns], [(a, b) for a, b, _ in columns], [(b, b) for _, b, _ in columns]
    ))  # fmt: skip
    ag, bg = math.fsum(a * g for a, _, g in columns), math.fsum(b * g for _, b, g in columns)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        return None
    return Fit(alpha=(ag * bb - bg * ab) / determinant, beta=(bg * aa - ag * ab) / determinant)
