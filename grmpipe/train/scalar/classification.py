"""Quality of probabilities as classifiers: accuracy, AUC, calibration. Pure: floats in, floats out."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from grmpipe.types import Metrics

NUM_BINS = 10


def quality(probabilities: Sequence[float], rights: Sequence[bool]) -> Metrics:
    """All metrics of this module; `base_rate` is the share of positives. No AUC without examples of both kinds."""
    metrics = {
        "accuracy": accuracy(probabilities, rights),
        "brier": brier(probabilities, rights),
        "calibration_error": calibration_error(probabilities, rights),
        "base_rate": fmean(rights),
    }
    return metrics | ({"auc": auc(probabilities, rights)} if len(set(rights)) == 2 else {})


def accuracy(probabilities: Sequence[float], rights: Sequence[bool]) -> float:
    """The share classified correctly with a threshold of one half."""
    return fmean((p >= 0.5) == right for p, right in zip(probabilities, rights, strict=True))


def auc(probabilities: Sequence[float], rights: Sequence[bool]) -> float:
    """The probability that a positive ranks above a negative, ties counted by half: the Mann-Whitney rank-sum
    statistic.
    """
    scores_N, rights_N = np.asarray(probabilities), np.asarray(rights)
    above, below = np.sort(scores_N[rights_N]), np.sort(scores_N[~rights_N])
    beaten = np.searchsorted(below, above, side="left") + np.searchsorted(below, above, side="right")
    return float(beaten.sum() / (2 * len(above) * len(below)))


def brier(probabilities: Sequence[float], rights: Sequence[bool]) -> float:
    """Mean squared error of the probabilities."""
    return fmean((p - right) ** 2 for p, right in zip(probabilities, rights, strict=True))


def calibration_error(probabilities: Sequence[float], rights: Sequence[bool]) -> float:
    """Expected calibration error over ten bins of equal width (arXiv 1706.04599)."""
    scores_N, rights_N = np.asarray(probabilities), np.asarray(rights, dtype=float)
    bins_N = np.minimum((scores_N * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = [
        abs(scores_N[bins_N == index].mean() - rights_N[bins_N == index].mean()) * (bins_N == index).mean()
        for index in np.unique(bins_N)
    ]
    return float(sum(gaps))
