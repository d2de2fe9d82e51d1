"""Events of the scheduler: spans on lanes. A sink is passed in from above."""

from typing import Protocol


class EventSink(Protocol):
    """Times are seconds of the event loop's clock. A lane is an engine, a learner or a stage."""

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None: ...


class NoEvents:
    """A sink that ignores events."""

    def span(self, lane: str, name: str, start_s: float, end_s: float, **args: str | int | float) -> None:
        return None
