"""How much cascades have escalated of what they decided on, and the bound on it."""

from collections.abc import Mapping

from grmpipe.judge.composition.cascade_counts import CascadeCounts


class ShareBounds:
    """Keeps what each cascade of a composition escalates to a share of the rollouts that it decided on, at any time of
    a run. limited: false lets them escalate all that they want to, so that a verdict doesn't depend on those before it.
    """

    def __init__(self, *, limited: bool = True) -> None:
        self._limited = limited
        self._decided: dict[str, CascadeCounts] = {}

    def go_on(self, before: Mapping[str, CascadeCounts]) -> None:
        """Continue from the counts of a checkpoint, before anything is decided."""
        self._decided = {name: CascadeCounts() + counts for name, counts in before.items()}

    def lets(self, cascade: str, share: float, rollouts: int, *, wanted: bool) -> bool:
        """Count rollouts that a cascade decides on together. Returns whether they may be escalated, if that is
        wanted.
        """
        counts = self._decided.setdefault(cascade, CascadeCounts())
        counts.rollouts += rollouts
        bound = share if self._limited else 1.0
        if not wanted or counts.escalated + rollouts > bound * counts.rollouts:
            return False
        counts.escalated += rollouts
        return True
