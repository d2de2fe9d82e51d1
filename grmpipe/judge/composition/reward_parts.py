"""The kinds of composition: a judge, a mean, a route, a jury, a gate. Pure: what is known of a group -> an outcome.

A failure stays one: the composition of a part that failed has failed, with the cause of the first one in order. Only a
jury does without some of its members, down to its quorum, and then for all siblings of a group.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from grmpipe.config.judge import Scale
from grmpipe.judge.composition.combine_verdicts import (
    average_components,
    average_normalised,
    in_reward_units,
    reaches,
    whole,
)
from grmpipe.judge.composition.outcome import Answered, KnownGroup, Outcome, RewardPart, Unsettled, collect_outcomes
from grmpipe.judge.verdict import make_failure
from grmpipe.types import Failed, Rollout, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePart:
    """A judge by its name. `scale`: of its scores."""

    name: str
    scale: Scale
    parts: tuple[RewardPart, ...] = ()

    def outcome(self, group: KnownGroup, sibling: int) -> Outcome:
        verdict = group.verdict(self.name, sibling)
        if verdict is None:
            return Unsettled(asks=(self.name,))
        if isinstance(verdict, Failed):
            return name_part(self.name, verdict)
        return in_reward_units(verdict, self.scale)

    def needs(self, part: RewardPart, group: KnownGroup, sibling: int) -> bool | None:
        raise AssertionError("a judge has no parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The weighted mean. by_group: each component is normalised by its group before it is weighted."""

    name: str
    parts: tuple[RewardPart, ...]
    weights: Mapping[str, float]
    by_group: bool = False

    def outcome(self, group: KnownGroup, sibling: int) -> Outcome:
        found = collect_outcomes(group, self.parts, sibling)
        if isinstance(found, Unsettled):
            return found
        if (failure := found.first_failure) is not None:
            return failure
        return self._normalised(group, found) if self.by_group else average_components(found.verdicts, self.weights)

    def needs(self, part: RewardPart, group: KnownGroup, sibling: int) -> bool | None:
        return True

    def _normalised(self, group: KnownGroup, mine: Answered) -> Outcome:
        """Waits for all siblings. Those without a verdict are in no mean."""
        siblings = [collect_outcomes(group, self.parts, sibling) for sibling in range(group.size)]
        known = [found for found in siblings if isinstance(found, Answered)]
        if len(known) < group.size:
            return Unsettled()
        valid = [found.verdicts for found in known if not found.failures]
        return average_normalised(valid, mine.verdicts, self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteBySource:
    """Another part for each source of prompts. `default`: for all other sources; None: their verdict fails."""

    name: str
    by_source: Mapping[str, RewardPart]
    default: RewardPart | None

    @property
    def parts(self) -> Sequence[RewardPart]:
        return (*self.by_source.values(), *([self.default] if self.default is not None else []))

    def outcome(self, group: KnownGroup, sibling: int) -> Outcome:
        source = group.prompt.source
        part = self.by_source.get(source, self.default)
        if part is None:
            return make_failure("refused", f"{self.name}: no judge for prompts of the source {source!r}")
        return group.outcome(part, sibling)

    def needs(self, part: RewardPart, group: KnownGroup, sibling: int) -> bool | None:
        return part is self.by_source.get(group.prompt.source, self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jury:
    """Several parts vote. With a quorum it does without members that failed: the same ones for all siblings of a group,
    because a sibling without its harshest judge would look better than the others. The verdict names who is absent.

    vote: (the verdicts of members, the skill of judges, the rollout) -> the verdict.
    by_skill: whether a member's vote counts by its skill, so that those without skill can't decide alone.
    """

    name: str
    parts: tuple[RewardPart, ...]
    quorum: int
    vote: JuryVote
    by_skill: bool = False

    def outcome(self, group: KnownGroup, sibling: int) -> Outcome:
        found = collect_outcomes(group, self.parts, sibling)
        if isinstance(found, Unsettled):
            return found
        if (voters := self._voters(group)) is None:
            return Unsettled()
        missing = next((failure for name, failure in found.failures.items() if name in voters), None)
        if missing is not None:
            return self._failure(found, missing, voters)
        verdicts = {name: verdict for name, verdict in found.verdicts.items() if name in voters}
        verdict = self.vote(verdicts, group.skill, group.rollouts[sibling])
        spread = statistics.pstdev(one.outcome for one in verdicts.values())
        absent = [part.name for part in self.parts if part.name not in voters]
        return replace(verdict, score_std=spread, absent=(*verdict.absent, *absent))

    def needs(self, part: RewardPart, group: KnownGroup, sibling: int) -> bool | None:
        return True

    def _voters(self, group: KnownGroup) -> frozenset[str] | None:
        """The members that vote on all siblings: those that leave most siblings with a verdict, and then most members.
        None while it isn't known who answered.
        """
        names = [part.name for part in self.parts]
        if self.quorum == len(names):
            return frozenset(names)
        if (siblings := group.find_siblings(self)) is None:
            return None
        given: list[frozenset[str]] = []
        for sibling in siblings:
            if isinstance(found := collect_outcomes(group, self.parts, sibling), Unsettled):
                return None
            given.append(frozenset(found.verdicts))
        failing = [name for name in names if not all(name in one for one in given)]
        choices = [
            frozenset(names).difference(left_out)
            for count in range(min(len(failing), len(names) - self.quorum) + 1)
            for left_out in itertools.combinations(reversed(failing), count)
        ]
        allowed = [choice for choice in choices if self._may_decide(choice, group.skill)]
        return max(allowed, key=lambda choice: (sum(choice <= one for one in given), len(choice)))

    def _may_decide(self, voters: frozenset[str], skill: Mapping[str, float]) -> bool:
        """Whether one of them has skill, if one of all members has."""
        skilled = {part.name for part in self.parts if skill.get(part.name, 0.0) > 0}
        return not (self.by_skill and skilled) or bool(skilled & voters)

    def _failure(self, found: Answered, failure: Failed, voters: frozenset[str]) -> Failed:
        why = f"{len(found.verdicts)} of {len(self.parts)} members gave a verdict, the quorum is {self.quorum}"
        if len(found.verdicts) >= self.quorum:
            chosen = ", ".join(part.name for part in self.parts if part.name in voters)
            why = f"the group is judged by {chosen}, who gave most of its siblings a verdict"
        return name_part(self.name, replace(failure, detail=f"{why}; {failure.detail}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A part with a veto: below `min_reward` the reward is `floor` and `inner` isn't asked."""

    name: str
    gate: RewardPart
    inner: RewardPart
    min_reward: float
    floor: float

    @property
    def parts(self) -> Sequence[RewardPart]:
        return (self.gate, self.inner)

    def outcome(self, group: KnownGroup, sibling: int) -> Outcome:
        gate = group.outcome(self.gate, sibling)
        if not isinstance(gate, Verdict):
            return gate
        if not reaches(gate.outcome, self.min_reward):
            return whole(group.rollouts[sibling], self.floor, [gate], gate.score_std)
        inner = group.outcome(self.inner, sibling)
        if not isinstance(inner, Verdict):
            return inner
        behind = gate.num_judgements + inner.num_judgements
        return replace(inner, num_judgements=behind, absent=(*gate.absent, *inner.absent))

    def needs(self, part: RewardPart, group: KnownGroup, sibling: int) -> bool | None:
        if part is self.gate:
            return True
        gate = group.outcome(self.gate, sibling)
        if isinstance(gate, Unsettled):
            return None
        return isinstance(gate, Verdict) and reaches(gate.outcome, self.min_reward)


def name_part(name: str, failure: Failed) -> Failed:
    """A failure without its evidence, with the name of the part that failed in front of its detail."""
    return make_failure(failure.cause, f"{name}: {failure.detail}", failure.attempts)


# -- votes of a jury -------------------------------------------------------------------------------------------------

JuryVote = Callable[[Mapping[str, Verdict], Mapping[str, float], Rollout], Verdict]


def vote_by_mean(members: Mapping[str, Verdict], skill: Mapping[str, float], rollout: Rollout) -> Verdict:
    return average_components(members, dict.fromkeys(members, 1.0))


def vote_on_rewards(choose: Callable[[Sequence[float]], float]) -> JuryVote:
    """What is chosen from the rewards that the members give, for the whole rollout."""

    def vote(members: Mapping[str, Verdict], skill: Mapping[str, float], rollout: Rollout) -> Verdict:
        rewards = [verdict.outcome for verdict in members.values()]
        return whole(rollout, choose(rewards), list(members.values()), 0.0)

    return vote


def vote_by_accuracy(members: Mapping[str, Verdict], skill: Mapping[str, float], rollout: Rollout) -> Verdict:
    """The mean, weighted by measured skill. While it isn't known of all, or is 0 of all, all weigh the same."""
    weights = {name: skill[name] for name in members if skill.get(name, 0.0) > 0}
    if not weights or not skill.keys() >= members.keys():
        return vote_by_mean(members, skill, rollout)
    verdict = average_components({name: members[name] for name in weights}, weights)
    return replace(verdict, num_judgements=sum(verdict.num_judgements for verdict in members.values()))
