"""Means with 95 % intervals, from values that come in clusters: of items or answers to one prompt. Pure."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Z = 1.96  # standard errors on each side


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its 95 % interval; NaN over nothing.

    error: half the interval's width, in standard errors. It is above 0 also where all values are equal: ten right
           answers of ten don't prove a hundred of a hundred.
    """

    mean: float
    low: float
    high: float
    num_clusters: int

    @property
    def error(self) -> float:
        return (self.high - self.low) / (2 * Z)


NOTHING = Estimate(mean=math.nan, low=math.nan, high=math.nan, num_clusters=0)


K = TypeVar("K", bound=Hashable)
Clusters = Mapping[K, Sequence[float]]  # values by cluster, at least one each


def estimate_clustered(clusters: Clusters[K]) -> Estimate:
    """The mean of all values. Those of a cluster aren't independent of each other: the interval is over clusters.

    On [0, 1] it is Wilson's with the effective number of values, p (1 - p) / SE^2, where SE is the standard error over
    clusters (Korn and Graubard 1998); without spread, the number of clusters. Elsewhere it is mean +- 1.96 SE.
    """
    return estimate_stratified([(1.0, clusters)])


def estimate_stratified(strata: Sequence[tuple[float, Clusters[K]]]) -> Estimate:
    """The weighted mean of the means of strata (weight, clusters). A cluster may have values in several strata."""
    known = [(weight, clusters) for weight, clusters in strata if clusters]
    if not known:
        return NOTHING
    total = math.fsum(weight for weight, _ in known)
    mean = even_error = 0.0  # even_error: squared, of the strata without spread
    residuals: defaultdict[K, float] = defaultdict(float)
    for weight, clusters in known:
        values = [value for own in clusters.values() for value in own]
        share, own_mean = weight / total, math.fsum(values) / len(values)
        mean += share * own_mean
        for name, own in clusters.items():
            residuals[name] += share * math.fsum(value - own_mean for value in own) / len(values)
        if len(known) > 1 and min(values) == max(values):
            even_error += (share * wilson(own_mean, 0.0, len(clusters)).error) ** 2
    square_error = even_error + math.fsum(residual**2 for residual in residuals.values())
    in_reach = all(0 <= value <= 1 for _, clusters in known for own in clusters.values() for value in own)
    return (wilson if in_reach else normal)(mean, square_error, len(residuals))


def wilson(mean: float, square_error: float, num_clusters: int) -> Estimate:
    """Wilson's interval of a mean on [0, 1] with this squared standard error."""
    mean = min(1.0, max(0.0, mean))
    spread = mean * (1 - mean)
    count = spread / square_error if square_error > 0 and spread > 0 else num_clusters
    middle = (mean + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z * math.sqrt(spread / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    return Estimate(
        mean=mean, low=max(0.0, min(mean, middle - half)), high=min(1.0, max(mean, middle + half)),
        num_clusters=num_clusters,
    )  # fmt: skip


def normal(mean: float, square_error: float, num_clusters: int) -> Estimate:
    half = Z * math.sqrt(square_error * num_clusters / max(1, num_clusters - 1))
    return Estimate(mean=mean, low=mean - half, high=mean + half, num_clusters=num_clusters)
