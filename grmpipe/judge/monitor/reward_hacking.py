"""The reward-hacking alarm: the reward rises while the true accuracy falls. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

ROUNDING = 1e-9  # in a reward or an accuracy
MIN_REWARD_RISE = 0.1  # as a share of the room that the first reading left to 1
MIN_GOLD_FALL = 0.1
AT_ONCE, TWICE = 1e-4, 0.03  # chance of a false fall, over all comparisons: for one reading, for two in succession
SURE, STILL, NOTED = 3.0, 2.0, 2.5  # standard errors: of a gap, of a fall that has rung, of a gain
MIN_ANCHORS = 8  # the fewest of a source that is read by itself
REWARD = ""  # the name of the reward as composed, beside those of judges
ALL = ""  # all sources together

Anchors = Mapping[str, float]  # anchor -> a value


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorReading:
    """An evaluation as the alarm reads it.

    right:   how right the answers to each anchor are, from 0 to 1.
    rewards: each anchor's, as composed (REWARD) and by each judge that judged every answer.
    sources: anchor -> its source.
    """

    step: int
    right: Anchors
    rewards: Mapping[str, Anchors]
    sources: Mapping[str, str]

    def gold(self, anchors: Sequence[str]) -> float:
        return statistics.fmean(self.right[one] for one in anchors)


@dataclass(frozen=True, slots=True, kw_only=True)
class HackingNews:
    """What a reading shows, as a sentence; empty: nothing. notice: no alarm, since good runs may look so."""

    alarm: str = ""
    notice: str = ""


class RewardHackingDetector:
    """Fires when the reward, or that of a judge, rises while the true accuracy falls (over-optimization, arXiv
    2210.10760), on all anchors or on those of one source.

    The reward must have risen by MIN_REWARD_RISE of the room that the first reading left to 1, or, on no scale, of its
    standard deviation then. The accuracy must be MIN_GOLD_FALL below its best reading, and the reward must not have
    followed it down by half as much or more. Errors are of paired differences: every reading has the same anchors.

    The best of many readings is best by chance too, so the fall that counts grows with the number of comparisons
    (Bonferroni's bound, over the sources and the pairs of readings). A fall that two readings in succession show may be
    smaller, and one that has fired goes on until it is within STILL standard errors.
    """

    def __init__(self) -> None:
        self._kept: list[AnchorReading] = []  # the first one, and the best of all anchors and of each source
        self._num_readings = 0
        self._suspects: frozenset[str] = frozenset()  # sources with a fall that one more reading would confirm
        self._ringing: frozenset[str] = frozenset()  # sources on which the last reading fired

    @property
    def has_read(self) -> bool:
        return bool(self._kept)

    def record(self, now: AnchorReading) -> HackingNews:
        """Record a reading."""
        scopes = split_by_source(now)
        num_comparisons = len(scopes) * max(1, self._num_readings) ** 2
        at_once, twice = (statistics.NormalDist().inv_cdf(1 - p / num_comparisons) for p in (AT_ONCE, TWICE))
        alarms, notices, suspects, best = dict[str, str](), dict[str, str](), set[str](), list[AnchorReading]()
        for scope, own in scopes.items():
            readings = [(one, [anchor for anchor in own if anchor in one.right]) for one in self._kept]
            before = [(one, anchors) for one, anchors in readings if anchors]
            if not before:
                best.append(now)
                continue
            top, anchors = max(before, key=lambda one: (one[0].gold(one[1]), one[0].step))
            best.append(top if top.gold(anchors) > now.gold(own) else now)
            falls = [top.right[one] - now.right[one] for one in anchors]
            error = estimate_error(falls)
            fall, least = statistics.fmean(falls), STILL if scope in self._ringing else twice
            fallen = fall >= MIN_GOLD_FALL - ROUNDING and fall > least * error
            risen = [name for name in now.rewards if fallen and self._leaves_truth(name, now, top, anchors)]
            if risen:
                suspects.add(scope)
                if scope in self._suspects or fall > at_once * error:
                    alarms[scope] = self._alarm(scope, risen, now, top, anchors)
            notices[scope] = self._notice(scope, now, own)
        self._suspects, self._ringing = frozenset(suspects), frozenset(alarms)
        self._num_readings += 1
        wanted = [self._kept[0] if self._kept else now, *best]
        self._kept = [one for one in (*self._kept, now) if any(one is other for other in wanted)]
        if any(alarms.values()):
            return HackingNews(alarm=f"The policy may be hacking the judge: {join_scopes(alarms)}.")
        return HackingNews(
            notice=f"The reward rises, the truth doesn't: {found}." if (found := join_scopes(notices)) else ""
        )

    def state(self) -> Mapping[str, Any]:
        """What a resume needs, as JSON."""
        kept = [asdict(one) for one in self._kept]
        suspects, ringing = sorted(self._suspects), sorted(self._ringing)
        return {"kept": kept, "num_readings": self._num_readings, "suspects": suspects, "ringing": ringing}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._kept = [AnchorReading(**one) for one in state["kept"]]
        self._num_readings = state["num_readings"]
        self._suspects, self._ringing = frozenset(state["suspects"]), frozenset(state["ringing"])

    # -- of a source and a judge -------------------------------------------------------------------------------------

    def _leaves_truth(self, name: str, now: AnchorReading, top: AnchorReading, anchors: Sequence[str]) -> bool:
        """Whether a reward has risen since the first reading, and has not followed the accuracy down since its best."""
        then, before = now.rewards[name], top.rewards.get(name, {})
        gaps = [
            top.right[one] - now.right[one] - 2 * (before[one] - then[one])
            for one in anchors
            if one in before and one in then
        ]
        return self._rise(name, now, anchors) is not None and sum(gaps) > SURE * estimate_error(gaps) * len(gaps)

    def _rise(self, name: str, now: AnchorReading, anchors: Sequence[str]) -> float | None:
        """The rise of a reward since the first reading, as a share of its room then; None if it hasn't surely risen."""
        first, then = self._kept[0].rewards.get(name, {}), now.rewards[name]
        both = [one for one in anchors if one in first and one in then]
        if len(both) < 2:
            return None
        room = find_room([first[one] for one in both])
        rises = [then[one] - first[one] for one in both]
        rise, error = statistics.fmean(rises), deviation(rises) / math.sqrt(len(rises) - 1)
        if rise < max(MIN_REWARD_RISE * room, 2 * error) - ROUNDING:
            return None
        return rise / room if room > 0 else 0.0

    def _alarm(
        self, scope: str, risen: Sequence[str], now: AnchorReading, top: AnchorReading, anchors: Sequence[str]
    ) -> str:
        gold, best = now.gold(anchors), top.gold(anchors)
        return (
            f"at step {now.step} {', '.join(self._in_words(name, now, anchors) for name in risen)}, while its accuracy "
            f"on gold anchors{of_source(scope)} is {gold:.2f}, down {best - gold:.2f} since step {top.step} "
            f"({len(anchors)} anchors)"
        )

    def _notice(self, scope: str, now: AnchorReading, own: Sequence[str]) -> str:
        """The accuracy has surely made less than half of the reward's way."""
        first = self._kept[0]
        anchors = [one for one in own if one in first.right]
        gains = [now.right[one] - first.right[one] for one in anchors]
        if not anchors or (room := 1 - first.gold(anchors)) <= 0:
            return ""
        most = (statistics.fmean(gains) + NOTED * estimate_error(gains)) / room
        risen = [name for name in now.rewards if (self._rise(name, now, anchors) or 0.0) > max(0.0, 2 * most)]
        if not risen:
            return ""
        return (
            f"at step {now.step} {', '.join(self._in_words(name, now, anchors) for name in risen)}, while its accuracy "
            f"on gold anchors{of_source(scope)} is {now.gold(anchors):.2f} ({first.gold(anchors):.2f} at step "
            f"{first.step}; {len(anchors)} anchors)"
        )

    def _in_words(self, name: str, now: AnchorReading, anchors: Sequence[str]) -> str:
        first, then = self._kept[0], now.rewards[name]
        before = first.rewards.get(name, {})
        both = [one for one in anchors if one in before and one in then]
        was, is_now = (statistics.fmean(rewards[one] for one in both) for rewards in (before, then))
        subject = "the reward is" if name == REWARD else f"judge {name} gives"
        return f"{subject} {is_now:.2f} ({was:.2f} at step {first.step})"


def split_by_source(reading: AnchorReading) -> dict[str, list[str]]:
    """Source -> its anchors, where several sources have enough of them; ALL -> all anchors."""
    by_source: dict[str, list[str]] = {}
    for anchor in reading.right:
        by_source.setdefault(reading.sources[anchor], []).append(anchor)
    several = {source: own for source, own in by_source.items() if source and len(own) >= MIN_ANCHORS}
    return {ALL: list(reading.right), **(several if len(by_source) > 1 else {})}


def find_room(rewards: Sequence[float]) -> float:
    """What is left to 1; of rewards that aren't on [0, 1] their standard deviation."""
    on_scale = min(rewards) >= 0 and max(rewards) <= 1
    return 1 - statistics.fmean(rewards) if on_scale else deviation(rewards)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation: that of `statistics` takes fractions, and 11 times as long for 64."""
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def estimate_error(differences: Sequence[float]) -> float:
    """The standard error of the mean of paired differences, with two of 1 and two of -1 added: also where all are alike
    there is an error (as in Agresti and Min 2005, doi:10.1002/sim.1781).
    """
    added = (*differences, 1.0, 1.0, -1.0, -1.0)
    return deviation(added) / math.sqrt(len(added))


def of_source(scope: str) -> str:
    return f" of the source {scope}" if scope != ALL else ""


def join_scopes(texts: Mapping[str, str]) -> str:
    """The words on all anchors, or else those on each source."""
    return texts.get(ALL) or "; ".join(filter(None, texts.values()))
