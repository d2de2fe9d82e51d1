"""Counts of a cascade, the error that its audit estimates from them, and when it is too large. Pure arithmetic."""

import math
from dataclasses import dataclass

from grmpipe.counts import Counts
from grmpipe.types import CascadeEvent

ONE_SIDED_95 = 1.645  # standard normal quantile
FEWEST_AUDITS = 10  # audits below which the error of an estimate isn't known well enough for an alarm


@dataclass(slots=True)
class CascadeCounts(Counts):
    """Sums over events. An audit is of one group, or of one rollout if single rollouts are escalated.

    The rollouts of one audit share their prompt, so their errors are no independent draws: the standard error is that
    of a ratio of sums over audits (cluster sampling), not over rollouts.
    """

    rollouts: int = 0
    unsure: int = 0
    escalated: int = 0
    audits: int = 0
    audited: int = 0  # rollouts
    error: float = 0.0  # sum, in reward units
    flipped: int = 0
    error_squares: float = 0.0  # over audits: sum of error^2, error * audited, audited^2
    error_times_audited: float = 0.0
    audited_squares: float = 0.0

    def count(self, event: CascadeEvent) -> None:
        self.rollouts += event.rollouts
        self.unsure += event.unsure
        self.escalated += event.escalated
        self.audits += event.audited > 0
        self.audited += event.audited
        self.error += event.error
        self.flipped += event.flipped
        self.error_squares += event.error**2
        self.error_times_audited += event.error * event.audited
        self.audited_squares += event.audited**2

    @property
    def unsure_share(self) -> float:
        return self.unsure / self.rollouts if self.rollouts else 0.0

    @property
    def escalated_share(self) -> float:
        return self.escalated / self.rollouts if self.rollouts else 0.0

    @property
    def mean_error(self) -> float | None:
        """Mean absolute difference between the cheap and the good reward, where the cheap judge is sure. None without
        an audit.
        """
        return self.error / self.audited if self.audited else None

    @property
    def standard_error(self) -> float | None:
        """The standard error of `mean_error`. None with fewer than two audits."""
        if self.audits < 2 or (mean := self.mean_error) is None:
            return None
        squares = self.error_squares - 2 * mean * self.error_times_audited + mean**2 * self.audited_squares
        return math.sqrt(max(0.0, squares) * self.audits / (self.audits - 1)) / self.audited

    @property
    def flipped_share(self) -> float | None:
        """The share of audited rollouts that only one of the judges passes."""
        return self.flipped / self.audited if self.audited else None


def is_known(counts: CascadeCounts) -> bool:
    """Whether the error of a cascade is known well enough to compare it with a limit."""
    return counts.standard_error is not None and counts.audits >= FEWEST_AUDITS


def exceeds(counts: CascadeCounts, max_error: float) -> bool:
    """Whether the error is above the limit beyond doubt."""
    mean, error = counts.mean_error, counts.standard_error
    if mean is None or error is None or not is_known(counts):
        return False
    return mean - ONE_SIDED_95 * error > max_error


def alarm_text(name: str, counts: CascadeCounts, max_error: float) -> str:
    return (
        f"The first judge of the cascade {name} is wrong where it is sure: in {counts.audits} audits its rewards "
        f"differ from the second judge's by {counts.mean_error:.3f} on average (standard error "
        f"{counts.standard_error:.3f}, limit {max_error:g}), and {counts.flipped_share:.0%} of the responses change "
        "sides; widen unsure_band, or let the second judge judge all"
    )
