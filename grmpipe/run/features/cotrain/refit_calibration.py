"""The calibration of a cascade's first judge that learns: refitted to its second judge's verdicts at each new version.

A version is calibrated by what the versions before it said of the latest groups. The second judge sees nearly all
groups of which the first is unsure, and an audit of the others. So each labelled group counts as often as there were
groups of its kind for each of that kind with labels: the map is one for all groups, not for those that were escalated.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from grmpipe.config.reward import RewardConfig
from grmpipe.evaluation.agreement import fit_isotonic
from grmpipe.judge.calibration import UNCALIBRATED, CalibrationInUse, compute_log_length, read_for
from grmpipe.judge.composition.combine_verdicts import reaches
from grmpipe.run.prepare import Prepared
from grmpipe.types import Failed, JudgedGroup

NUM_GROUPS = 256  # latest groups that a map is fitted to
FEWEST = 20  # labelled responses, of the sure groups and in all

Said = tuple[float, float, float]  # the first judge's reward, uncalibrated; log length; the label


@dataclass(frozen=True, slots=True)
class SeenGroup:
    """A group that the first judge has judged. labelled: its responses that the second one judged too."""

    is_unsure: bool
    labelled: Sequence[Said]


class CalibrationRefit:
    """Refits the calibration of `cascade.first`."""

    def __init__(self, cascade: RewardConfig, in_use: CalibrationInUse, pass_reward: float, *, thoughts: bool) -> None:
        self._first, self._then = str(cascade.first), str(cascade.then)
        low, high = cascade.unsure_band
        self._band = float(low), float(high)
        self._in_use, self._pass_reward, self._thoughts = in_use, pass_reward, thoughts
        self._groups: deque[SeenGroup] = deque(maxlen=NUM_GROUPS)

    def take(self, group: JudgedGroup) -> None:
        """Take a judged group. One in which a verdict failed isn't known to be sure, and is left out."""
        found: list[Said] = []
        is_unsure = False
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
            if isinstance(verdict, Failed) or (reward := verdict.breakdown.get(self._first)) is None:
                return
            is_unsure |= reaches(reward, self._band[0]) and reaches(self._band[1], reward)
            if (label := verdict.breakdown.get(self._then)) is not None:
                length = compute_log_length(rollout.show_text(thoughts=self._thoughts))
                found.append((verdict.breakdown[f"{self._first}/{UNCALIBRATED}"], length, self._label(label)))
        self._groups.append(SeenGroup(is_unsure, found))

    def _label(self, reward: float) -> float:
        return float(reaches(reward, self._pass_reward)) if self._in_use.now.target == "right" else reward

    def fit(self) -> None:
        """Refit the map, if enough responses have labels. Its length term stays."""
        now, points = self._in_use.now, []
        for is_unsure in (False, True):
            seen = [group for group in self._groups if group.is_unsure is is_unsure]
            labelled = [group for group in seen if group.labelled]
            points += [(*said, len(seen) / len(labelled)) for group in labelled for said in group.labelled]
            if len(points) < FEWEST or (seen and not labelled):
                return
        index = [said - now.length_slope * (length - now.length_mean) for said, length, _, _ in points]
        knots, rewards = fit_isotonic(index, [point[2] for point in points], [point[3] for point in points])
        self._in_use.now = msgspec.structs.replace(now, said=tuple(knots), rewards=tuple(rewards))


def make_refits(prepared: Prepared, role: str) -> list[CalibrationRefit]:
    """The calibrations that change with a model. role: its own."""
    config, found = prepared.config, []
    for name, judge in config.judging.select_asking(role).items():
        cascade, calibration = config.find_refitting(name), read_for(judge)
        if cascade is not None and calibration is not None:
            in_use = prepared.calibrations.setdefault(name, CalibrationInUse(calibration))
            passes = config.main_judge.scale.to_reward(config.data.labels.pass_score)
            found.append(CalibrationRefit(cascade, in_use, passes, thoughts=judge.format.show_thoughts))
    return found
