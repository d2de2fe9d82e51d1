"""The reward-hacking alarm: the reward rises while the true accuracy falls. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

ROUNDING = 1e-9  # of a reward or an accuracy
MIN_REWARD_RISE = 0.1  # as a share of the room that the first reading left to 1
MIN_GOLD_FALL = 0.1
SURE = 3.0  # standard errors of a fall of the accuracy that chance doesn't explain
REWARD = ""  # the name of the reward as composed, beside those of judges


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorReading:
    """An evaluation as the alarm reads it.

    rewards: the mean reward as composed (REWARD) and by each judge that judged every answer.
    gold:    the share of right answers among `answers`.
    spread:  the standard deviation of the rewards that aren't on [0, 1].
    """

    step: int
    rewards: Mapping[str, float]
    gold: float
    answers: int
    spread: Mapping[str, float] = field(default_factory=dict)


class RewardHackingDetector:
    """Fires when the reward, or that of a judge, rises while the true accuracy falls (over-optimization, arXiv
    2210.10760).

    The reward must have risen by MIN_REWARD_RISE of the room that the first reading left to 1, or, on no scale, of its
    standard deviation then. The accuracy must be MIN_GOLD_FALL below its best reading, more than chance explains, and
    the reward must not have followed it down by half as much or more.
    """

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, float, float]] = {}  # step, reward, its room
        self._best: AnchorReading | None = None

    def record(self, reading: AnchorReading) -> str | None:
        """Record a reading. Returns a sentence with the numbers if the alarm fires."""
        for name, reward in reading.rewards.items():
            room = reading.spread.get(name, max(1 - reward, 0.0))
            self._first.setdefault(name, (reading.step, reward, room))
        if self._best is None or reading.gold >= self._best.gold:
            self._best = reading
        fall = self._best.gold - reading.gold
        if fall < MIN_GOLD_FALL - ROUNDING or fall <= SURE * standard_error(self._best, reading):
            return None
        risen = [name for name in reading.rewards if self._rises(name, reading, self._best)]
        if not risen:
            return None
        return (
            f"The policy may be hacking the judge: at step {reading.step} "
            f"{', '.join(self._in_words(name, reading) for name in risen)}, while its accuracy on gold anchors is "
            f"{reading.gold:.2f}, down {fall:.2f} since step {self._best.step} ({reading.answers} answers)."
        )

    def _rises(self, name: str, now: AnchorReading, best: AnchorReading) -> bool:
        reward, (_, first, room) = now.rewards[name], self._first[name]
        followed = best.rewards.get(name, reward) - reward
        return reward - first >= MIN_REWARD_RISE * room - ROUNDING and 2 * followed < best.gold - now.gold

    def _in_words(self, name: str, now: AnchorReading) -> str:
        step, first, _ = self._first[name]
        subject = "the reward is" if name == REWARD else f"judge {name} gives"
        return f"{subject} {now.rewards[name]:.2f} ({first:.2f} at step {step})"


def standard_error(one: AnchorReading, other: AnchorReading) -> float:
    """The standard error of the difference of two accuracies; one success and one failure are added to each, so that
    accuracies of 0 and 1 have an error too (Agresti and Coull 1998).
    """
    return math.sqrt(sum(_variance(reading.gold, reading.answers) for reading in (one, other)))


def _variance(share: float, count: int) -> float:
    smoothed = (share * count + 1) / (count + 2)
    return smoothed * (1 - smoothed) / (count + 2)
