"""Means with 95 % intervals, from values that come in clusters: of items or answers to one prompt. Pure."""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Z = 1.96  # standard errors on each side
ADDED = 2  # clusters of zeros, and as many of ones


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

    On [0, 1] it is Agresti's and Coull's (1998, doi:10.1080/00031305.1998.10480550) for clusters: two of zeros and two
    of ones are added. So few clusters that happen to be alike, or all near 0 or 1, don't pass for certain: whatever the
    values within clusters are, another one may be wrong altogether. Elsewhere it is mean +- 1.96 SE.
    """
    return estimate_stratified([(1.0, clusters)])


def estimate_stratified(strata: Sequence[tuple[float, Clusters[K]]]) -> Estimate:
    """The weighted mean of the means of strata (weight, clusters). A cluster may have values in several strata."""
    known = [(weight, clusters) for weight, clusters in strata if clusters]
    if not known:
        return NOTHING
    total = math.fsum(weight for weight, _ in known)
    mean = added = 0.0  # added: to the squared error, by the added clusters of each stratum
    residuals: defaultdict[K, float] = defaultdict(float)
    for weight, clusters in known:
        values = [value for own in clusters.values() for value in own]
        share, own_mean = weight / total, math.fsum(values) / len(values)
        mean += share * own_mean
        own_residuals = [math.fsum(value - own_mean for value in own) / len(values) for own in clusters.values()]
        for name, residual in zip(clusters, own_residuals, strict=True):
            residuals[name] += share * residual
        squared = math.fsum(residual**2 for residual in own_residuals)
        added += share**2 * max(0.0, with_added_clusters(own_mean, squared, len(clusters)) - squared)
    num_clusters, squared = len(residuals), math.fsum(residual**2 for residual in residuals.values())
    if all(0 <= value <= 1 for _, clusters in known for own in clusters.values() for value in own):
        mean, middle = min(1.0, max(0.0, mean)), add_clusters(mean, num_clusters)
        half = Z * math.sqrt(squared + added)
        low, high = max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half))
    else:
        half = Z * math.sqrt(squared * num_clusters / max(1, num_clusters - 1))
        low, high = mean - half, mean + half
    return Estimate(mean=mean, low=low, high=high, num_clusters=num_clusters)


def add_clusters(mean: float, num_clusters: int) -> float:
    """The mean with ADDED clusters of zeros and as many of ones."""
    return (num_clusters * mean + ADDED) / (num_clusters + 2 * ADDED)


def with_added_clusters(mean: float, squared: float, num_clusters: int) -> float:
    """The squared standard error of `add_clusters`. squared: that of the mean."""
    middle = add_clusters(mean, num_clusters)
    own = num_clusters**2 * squared + num_clusters * (mean - middle) ** 2
    return (own + ADDED * (middle**2 + (1 - middle) ** 2)) / (num_clusters + 2 * ADDED) ** 2
