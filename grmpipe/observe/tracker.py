"""Passes metrics and tables to sinks: the tracker and the protocol of a sink. Knows no sink by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from grmpipe.observe.guard import Guard
from grmpipe.observe.sample_rows import SampleRow
from grmpipe.types import Metrics


class Sink(Protocol):
    """Takes the results of a step. May raise: the tracker guards it."""

    @property
    def name(self) -> str: ...

    def log(self, step: int, metrics: Metrics) -> None: ...

    def table(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Passes results to every sink. An error is counted in `failures`, and the sink is called again at the next
    step.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._guard = Guard()

    @property
    def failures(self) -> Counter[str]:
        return self._guard.failures

    def log(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            with self._guard.watch(sink.name):
                sink.log(step, metrics)

    def table(self, step: int, rows: Sequence[SampleRow]) -> None:
        for sink in self._sinks:
            with self._guard.watch(sink.name):
                sink.table(step, rows)

    def close(self) -> None:
        for sink in self._sinks:
            with self._guard.watch(sink.name):
                sink.close()
