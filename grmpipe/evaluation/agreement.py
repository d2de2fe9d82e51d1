"""How well scores agree with labels: ranks, weighted kappa, the best monotone map. Pure: numbers in, numbers out."""

import random
from collections.abc import Hashable, Sequence

import numpy as np

FEW = 64  # values whose inversions are counted pair by pair


def rank_values(values: Sequence[float]) -> np.ndarray:
    """The rank of each value, from 1; equal ones have the mean of theirs."""
    _, places_N, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places_N]


def compute_spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's rank correlation; NaN if one of the two doesn't vary."""
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return float("nan")
    return float(np.corrcoef(rank_values(xs), rank_values(ys))[0, 1])


def compute_kendall(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Kendall's tau-b, which counts ties (Kendall 1945, doi:10.1093/biomet/33.3.239); NaN if one of the two doesn't
    vary. In n log n steps (Knight 1966, doi:10.1080/01621459.1966.10480879).
    """
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return float("nan")
    order_N = np.lexsort((ys, xs))
    x_N, y_N = np.asarray(xs, dtype=float)[order_N], np.asarray(ys, dtype=float)[order_N]
    total, discordant = len(x_N) * (len(x_N) - 1) // 2, sort_counting(y_N)[1]
    tied_x, tied_y = count_tied_pairs(x_N), count_tied_pairs(y_N)
    tied_both = count_tied_pairs(np.stack((x_N, y_N), axis=1))
    concordant = total - tied_x - tied_y + tied_both - discordant
    return float((concordant - discordant) / np.sqrt(float(total - tied_x) * float(total - tied_y)))


def count_tied_pairs(values: np.ndarray) -> int:
    """Pairs of equal values, or rows."""
    _, counts = np.unique(values, axis=0, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


def sort_counting(values_N: np.ndarray) -> tuple[np.ndarray, int]:
    """The values in order, and the number of pairs of which the larger one came first."""
    if len(values_N) <= FEW:
        return np.sort(values_N), int(np.triu(values_N[:, None] > values_N[None, :], 1).sum())
    (left_N, first), (right_N, second) = (sort_counting(half_N) for half_N in np.array_split(values_N, 2))
    across = len(left_N) * len(right_N) - int(np.searchsorted(left_N, right_N, side="right").sum())
    return np.sort(values_N, kind="stable"), first + second + across


def compute_quadratic_kappa(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Cohen's kappa with quadratic weights (1968, doi:10.1037/h0026256); NaN if all scores are one. Between whole
    scores it is Lin's concordance correlation: nothing is rounded.
    """
    x_N, y_N = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    by_chance = x_N.var() + y_N.var() + (x_N.mean() - y_N.mean()) ** 2
    return float(1 - ((x_N - y_N) ** 2).mean() / by_chance) if by_chance > 0 else float("nan")


# -- the best monotone map ---------------------------------------------------------------------------------------------


def fit_isotonic(
    xs: Sequence[float], ys: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[list[float], list[float]]:
    """Isotonic regression: the map that never falls with the least squared error, as knots and their values. Between
    them it is linear (`np.interp`). By pooling adjacent violators (Barlow et al. 1972); equal xs are averaged first.
    """
    weights_N = np.ones(len(xs)) if weights is None else np.asarray(weights, dtype=float)
    values_K, places_N = np.unique(np.asarray(xs, dtype=float), return_inverse=True)
    counts_K = np.bincount(places_N, weights=weights_N)
    sums_K = np.bincount(places_N, weights=weights_N * np.asarray(ys, dtype=float))
    blocks: list[tuple[float, float, float, float]] = []  # first and last x, sum and weight of ys
    for x, total, count in zip(values_K.tolist(), sums_K.tolist(), counts_K.tolist(), strict=True):
        block = (x, x, total, count)
        while blocks and blocks[-1][2] * block[3] >= block[2] * blocks[-1][3]:
            before = blocks.pop()
            block = (before[0], block[1], before[2] + block[2], before[3] + block[3])
        blocks.append(block)
    knots = [(x, total / count) for first, last, total, count in blocks for x in dict.fromkeys((first, last))]
    return [x for x, _ in knots], [y for _, y in knots]


def map_crosswise(scores: Sequence[float], labels: Sequence[float], clusters: Sequence[Hashable]) -> np.ndarray | None:
    """Each score, mapped to the labels' scale by the monotone map that fits the other half of the clusters: a map that
    had seen its own labels would flatter them. None with fewer than two clusters.
    """
    names = list(dict.fromkeys(clusters))
    if len(names) < 2:
        return None
    random.Random(0).shuffle(names)
    chosen = set(names[::2])
    in_first_N = np.asarray([name in chosen for name in clusters])
    x_N, y_N, mapped_N = np.asarray(scores, dtype=float), np.asarray(labels, dtype=float), np.empty(len(scores))
    for half_N in (in_first_N, ~in_first_N):
        mapped_N[half_N] = np.interp(x_N[half_N], *fit_isotonic(x_N[~half_N].tolist(), y_N[~half_N].tolist()))
    return mapped_N
