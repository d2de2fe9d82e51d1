"""Metrics that each rank reports of its own device: their names, and one value of all ranks. Imports no torch."""

from collections.abc import Sequence

from grmpipe.types import Metrics

OF_RANK = "rank/"  # begins the names of metrics that differ between ranks
FLOPS, PEAK_FLOPS = f"{OF_RANK}model_flops", f"{OF_RANK}peak_flops_per_s"


def over_ranks(answers: Sequence[Metrics]) -> Metrics:
    """The metrics of rank 0 that all ranks share, and those of each rank as sums, or as maximum and mean."""
    metrics = {name: value for name, value in answers[0].items() if not name.startswith(OF_RANK)}
    for name in answers[0].keys() - metrics.keys():
        values = [answer[name] for answer in answers if name in answer]
        if len(values) < len(answers):  # a GPU of another kind: a sum or a mean over the rest would be wrong
            continue
        shown = name.removeprefix(OF_RANK)
        if name in (FLOPS, PEAK_FLOPS):
            metrics[f"perf/{shown}"] = sum(values)
        else:
            metrics |= {f"perf/{shown}": max(values), f"perf/{shown}_mean": sum(values) / len(values)}
    return metrics
