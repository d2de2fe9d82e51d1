"""What all ranks of a learner report alike, for tests that compare ranks. Computes nothing."""

from __future__ import annotations

from grmpipe.train.ranks import OF_RANK
from grmpipe.types import Metrics


def of_all_ranks(metrics: Metrics) -> Metrics:
    """The metrics of a step without those of each rank's own device."""
    return {name: value for name, value in metrics.items() if not name.startswith(OF_RANK)}
