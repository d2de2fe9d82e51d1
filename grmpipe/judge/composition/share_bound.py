"""How much cascades have escalated of what they decided on, and the bounds on it. Asks no judge."""

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
    """The bounds of the cascades of a composition, by name."""

    def __init__(self) -> None:
        self._by_cascade: dict[str, ShareBound] = {}
        self._before: Mapping[str, CascadeCounts] = {}

    def go_on(self, before: Mapping[str, CascadeCounts]) -> None:
        """Continue from the counts of a checkpoint, before anything is decided."""
        self._before = before

    def of(self, cascade: str, share: float) -> ShareBound:
        if cascade not in self._by_cascade:
            before = self._before.get(cascade, CascadeCounts())
            self._by_cascade[cascade] = ShareBound(share, rollouts=before.rollouts, escalated=before.escalated)
        return self._by_cascade[cascade]
