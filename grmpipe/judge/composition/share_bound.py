"""How much cascades have escalated of what they decided on, and the bounds on it."""

from __future__ import annotations

from collections.abc import Mapping

from grmpipe.judge.composition.cascade_counts import CascadeCounts


class ShareBound:
    """Keeps what is escalated to a share of the rollouts that were decided on, at any time of a run."""

    def __init__(self, share: float, *, rollouts: int = 0, escalated: int = 0) -> None:
        """rollouts, escalated: decided on before."""
        self._share = share
        self._rollouts = rollouts
        self._escalated = escalated

    def decided(self, rollouts: int, *, wanted: bool) -> bool:
        """Count rollouts that are decided on together. Returns whether they may be escalated, if that is wanted."""
        self._rollouts += rollouts
        if not wanted or self._escalated + rollouts > self._share * self._rollouts:
            return False
        self._escalated += rollouts
        return True


class ShareBounds:
    """The bounds of the cascades of a composition, by name. limited: false lets them escalate all that they want to, so
    that a verdict doesn't depend on those before it.
    """

    def __init__(self, *, limited: bool = True) -> None:
        self._limited = limited
        self._by_cascade: dict[str, ShareBound] = {}
        self._before: Mapping[str, CascadeCounts] = {}

    def go_on(self, before: Mapping[str, CascadeCounts]) -> None:
        """Continue from the counts of a checkpoint, before anything is decided."""
        self._before = before

    def of(self, cascade: str, share: float) -> ShareBound:
        if cascade not in self._by_cascade:
            before = self._before.get(cascade, CascadeCounts())
            bound = share if self._limited else 1.0
            self._by_cascade[cascade] = ShareBound(bound, rollouts=before.rollouts, escalated=before.escalated)
        return self._by_cascade[cascade]
