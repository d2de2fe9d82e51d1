"""Figures of several answers to each prompt: avg@n, pass@k, with intervals over prompts. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grmpipe.evaluation.intervals import Estimate, estimate_clustered
from grmpipe.types import Metrics

Scores = Mapping[str, Sequence[float]]  # by prompt: 1 or 0, or rewards, of those of its answers that have one


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSampling:
    """num_samples: answers sampled for each prompt. pass_k: each k of pass@k, at most that."""

    num_samples: int
    pass_k: tuple[int, ...]


def pass_at(num_answers: int, num_passed: int, k: int) -> float:
    """The probability that k of these answers, drawn without replacement, hold one that passes: 1 - C(n-c, k) / C(n, k)
    (Chen et al. 2021, arXiv 2107.03374), the unbiased estimate of pass@k.
    """
    assert 0 <= num_passed <= num_answers and 1 <= k <= num_answers
    return 1 - math.comb(num_answers - num_passed, k) / math.comb(num_answers, k)


def figures(rewards: Scores, passed: Scores, counting: AnswerSampling, prefix: str = "") -> dict[str, Estimate]:
    """Name -> mean over prompts: avg_at_<n>, pass_at_<k>. Without prompts there is no figure.

    A prompt counts by those of its answers that have a score, and not at all for a k above their number: whoever failed
    is no number.
    """
    found = {f"avg_at_{counting.num_samples}": mean_over_prompts(rewards)}
    for k in counting.pass_k:
        shares = {name: [pass_at(len(own), round(sum(own)), k)] for name, own in passed.items() if len(own) >= k}
        found[f"pass_at_{k}"] = estimate_clustered(shares)
    return {f"{prefix}{name}": one for name, one in found.items() if one.num_clusters}


def mean_over_prompts(scores: Scores) -> Estimate:
    """Every prompt weighs the same, whatever the number of its answers."""
    return estimate_clustered({name: [statistics.fmean(own)] for name, own in scores.items() if own})


def with_ends(found: Mapping[str, Estimate]) -> Metrics:
    """The figures as metrics: each with the ends of its 95 % interval."""
    metrics: Metrics = {}
    for name, one in found.items():
        metrics |= {name: one.mean, f"{name}_low": one.low, f"{name}_high": one.high}
    return metrics
