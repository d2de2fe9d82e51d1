"""How often each judge was right on held-out prompts, for a jury that weighs its members by it."""

from collections.abc import Mapping


class MeasuredSkill:
    """The skill of judges by the latest evaluation: twice the accuracy less one, so that a judge who is right half of
    the time weighs nothing; at least 0.

    For independent judges the best weight of a vote is the log-odds of being right (Nitzan and Paroush 1982); this is
    its linear form, which a small sample doesn't make infinite.
    """

    def __init__(self) -> None:
        self._accuracy: dict[str, float] = {}

    def take_accuracies(self, accuracy: Mapping[str, float]) -> None:
        """Take the accuracies of an evaluation; of judges that it didn't measure the earlier ones hold."""
        self._accuracy |= accuracy

    @property
    def accuracy(self) -> Mapping[str, float]:
        """What was measured last, for a checkpoint."""
        return dict(self._accuracy)

    def weights(self) -> dict[str, float]:
        """Judge -> weight, of those measured so far."""
        return {name: max(0.0, 2 * accuracy - 1) for name, accuracy in self._accuracy.items()}
