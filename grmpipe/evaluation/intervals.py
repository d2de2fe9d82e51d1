"""Figures with 95 % intervals, from values that come in clusters: of items or answers to one prompt. Pure."""

import functools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Z = 1.96  # standard errors on each side
ADDED = 2  # clusters of zeros, and as many of ones
NUM_GROUPS = 40  # of clusters, for figures that are no means


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


# -- two judges on the same items -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A mean difference of paired values, its 95 % interval, and the two-sided p of the test that it is 0."""

    mean: float
    low: float
    high: float
    p: float
    num_values: int
    num_clusters: int


def estimate_difference(clusters: Clusters[K], *, are_shares: bool) -> Difference:
    """The mean of all differences. Its interval is over clusters: Student's t of their residuals.

    are_shares: differences of two shares, on [-1, 1]. They are mostly 0, and few others may by chance be all alike:
        half a value of 1 and half a value of -1 are added, as Agresti and Min (2005, doi:10.1002/sim.1781) add them to
        the discordant pairs. So two judges who agree on 20 items have an interval too. Without them it covers as little
        as .53 of the true differences (20 items, of which 5 % part); with a cluster of each added, or a whole value,
        more than .97 from 200 items on.
    """
    values = [value for own in clusters.values() for value in own]
    if not values:
        return Difference(mean=math.nan, low=math.nan, high=math.nan, p=math.nan, num_values=0, num_clusters=0)
    added = 0.5 if are_shares else 0.0
    total, count = math.fsum(values), len(values) + 2 * added
    middle, num_clusters = total / count, len(clusters) + 2 * added
    squared = math.fsum((math.fsum(own) - len(own) * middle) ** 2 for own in clusters.values())
    squared += added * ((1 - middle) ** 2 + (1 + middle) ** 2)
    mean, freedom = total / len(values), num_clusters - 1
    if not freedom:
        low, high, p = -math.inf, math.inf, math.nan
    else:
        error = math.sqrt(squared * num_clusters / freedom) / count
        half = find_t_quantile(freedom) * error
        low, high = min(mean, middle - half), max(mean, middle + half)
        p = compute_t_tail(abs(middle) / error, freedom) if error else float(middle == 0)
    if added:
        low, high = max(-1.0, low), min(1.0, high)
    return Difference(mean=mean, low=low, high=high, p=p, num_values=len(values), num_clusters=len(clusters))


def compute_t_tail(t: float, freedom: float) -> float:
    """The probability that Student's t is further from 0 than this: the regularized incomplete beta function
    I_x(freedom / 2, 1 / 2) at x = freedom / (freedom + t^2), by its continued fraction (DLMF 8.17.22).
    """
    a, b, x = freedom / 2, 0.5, freedom / (freedom + t * t)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly: I_x(a, b) = 1 - I_(1 - x)(b, a)
        return 1 - complete_beta(b, a, t * t / (freedom + t * t))
    return complete_beta(a, b, x)


def complete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), for x below (a + 1) / (a + b + 2)."""
    if x == 0:
        return 0.0
    fraction = 1.0
    for m in range(200, 0, -1):  # from the inside out
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = 1 + even / (1 + odd / fraction)
    fraction = 1 - (a + b) * x / (a + 1) / fraction
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(scale) / (a * fraction)


@functools.cache
def find_t_quantile(freedom: float) -> float:
    """The distance from 0 that Student's t exceeds with a probability of 5 %."""
    low, high = 1.9, 13.0  # at infinity, at 1
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if compute_t_tail(middle, freedom) > 0.05 else (low, middle)
    return high


# -- figures that are no means ----------------------------------------------------------------------------------------


def estimate_correlation(compute: Callable[[Sequence[int]], float], clusters: Sequence[Sequence[int]]) -> Estimate:
    """A figure on [-1, 1] of all items, such as a rank correlation. Its interval is by the jackknife over groups of
    clusters (Kott 2001, J. Official Statistics 17:521), in Fisher's z, by the delta method.

    compute:  (items) -> the figure; NaN if they have none.
    clusters: the items of each, as numbers.
    """
    everything = [item for cluster in clusters for item in cluster]
    mean, num_clusters = compute(everything), len(clusters)
    order = list(range(num_clusters))
    random.Random(0).shuffle(order)  # neighbours in a file are often alike
    groups = [set(order[start::NUM_GROUPS]) for start in range(min(NUM_GROUPS, num_clusters))]
    without = [[item for at, own in enumerate(clusters) if at not in group for item in own] for group in groups]
    found, freedom = [compute(items) for items in without if items], len(groups) - 1
    if freedom < 1 or any(map(math.isnan, (mean, *found))):
        return Estimate(mean=mean, low=math.nan, high=math.nan, num_clusters=num_clusters)
    error = freedom * math.sqrt(statistics.variance(found) / len(found))
    bound = 1 - min(1.0, 2 / num_clusters)  # ten pairs in the right order don't prove that all are
    error = error / (1 - mean**2) if abs(mean) < bound else 1 / math.sqrt(num_clusters)
    middle, half = math.atanh(min(bound, max(-bound, mean))), find_t_quantile(freedom) * error
    low, high = min(mean, math.tanh(middle - half)), max(mean, math.tanh(middle + half))
    return Estimate(mean=mean, low=low, high=high, num_clusters=num_clusters)
