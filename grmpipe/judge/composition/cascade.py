"""A cheap judge before a better one: where the first is unsure, what is escalated, what the audit finds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grmpipe.judge.composition.combine_verdicts import reaches
from grmpipe.judge.composition.outcome import Decision, KnownGroup, Outcome, RewardPart, Unsettled
from grmpipe.models.seeds import first_name, is_drawn
from grmpipe.types import CascadeEvent, Failed, Verdict

EventKey = tuple[str, int | None, Literal["decided", "audited"]]  # cascade; sibling, or None for all; what happened


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """When a verdict is unsure: its votes spread by more than `above_std`, its reward is in `band`, or its judge
    abstained. Reward units; None: not used.
    """

    above_std: float | None = None
    band: tuple[float, float] | None = None

    def about(self, verdict: Verdict | Failed) -> bool:
        if isinstance(verdict, Failed):
            return verdict.cause == "undecided"
        if self.above_std is not None and not reaches(self.above_std, verdict.score_std):
            return True
        return (
            self.band is not None and reaches(verdict.outcome, self.band[0]) and reaches(self.band[1], verdict.outcome)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Which sure verdicts are checked by the second judge: the same ones in every run of a seed."""

    share: float
    seed: int

    def takes(self, cascade: str, drawn_for: str) -> bool:
        return is_drawn(self.seed, f"cascade {cascade} {first_name(drawn_for)}", self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """`first` judges everything, `then` what is escalated or audited; who is asked last decides.

    If `then` fails, so does the cascade: the cheap verdict never stands in for it. A failure of `first` stays one
    unless its group is escalated or audited.

    together: whether all siblings are escalated if one of them is unsure.
    share:    largest share of the rollouts that is escalated.
    pass_at:  lowest reward that passes a response: for the audit.
    """

    name: str
    first: RewardPart
    then: RewardPart
    doubt: Doubt
    share: float
    audit: Audit
    together: bool
    pass_at: float

    @property
    def parts(self) -> Sequence[RewardPart]:
        return (self.first, self.then)

    def outcome(self, group: KnownGroup, sibling: int) -> Outcome:
        first = group.outcome(self.first, sibling)
        if isinstance(first, Unsettled):
            return first
        decision = self._decision(group, sibling, first)
        if decision is None:
            return Unsettled()
        return first if decision == "keep" else group.outcome(self.then, sibling)

    def _decision(self, group: KnownGroup, sibling: int, first: Verdict | Failed) -> Decision | None:
        """The decision that the sibling is part of: about it alone, or about all that come as far as this cascade.
        None while it is open.
        """
        if not self.together:
            return group.decision(
                self.name, sibling, lambda: self._decide(group, f"{group.group_id}/{sibling}", [first])
            )
        if (siblings := group.find_siblings(self)) is None or (firsts := group.outcomes(self.first, siblings)) is None:
            return None
        return group.decision(self.name, None, lambda: self._decide(group, group.group_id, firsts))

    def needs(self, part: RewardPart, group: KnownGroup, sibling: int) -> bool | None:
        if part is self.first:
            return True
        if isinstance(first := group.outcome(self.first, sibling), Unsettled):
            return None
        decision = self._decision(group, sibling, first)
        return None if decision is None else decision != "keep"

    def _decide(self, group: KnownGroup, drawn_for: str, firsts: Sequence[Verdict | Failed]) -> Decision:
        is_unsure = any(map(self.doubt.about, firsts))
        if group.bounds.lets(self.name, self.share, len(firsts), wanted=is_unsure):
            return "escalate"
        is_sure = not is_unsure and any(isinstance(first, Verdict) for first in firsts)
        return "audit" if is_sure and self.audit.takes(self.name, drawn_for) else "keep"

    # -- events -----------------------------------------------------------------------------------------------------

    def events(self, group: KnownGroup) -> dict[EventKey, CascadeEvent]:
        """What it has done for a group so far: its decisions, and the audits that are finished."""
        made = {sibling: one for (cascade, sibling), one in group.decisions.items() if cascade == self.name}
        found: dict[EventKey, CascadeEvent] = {}
        for sibling, decision in made.items():
            siblings = group.find_siblings(self) if sibling is None else [sibling]
            assert siblings is not None, "it has decided"
            found[self.name, sibling, "decided"] = self._decided(group, siblings, decision)
            if decision == "audit" and (audited := self._audited(group, siblings)) is not None:
                found[self.name, sibling, "audited"] = audited
        return found

    def _decided(self, group: KnownGroup, siblings: Sequence[int], decision: Decision) -> CascadeEvent:
        firsts = [group.get_settled(self.first, sibling) for sibling in siblings]
        return CascadeEvent(
            cascade=self.name,
            rollouts=len(siblings),
            unsure=sum(self.doubt.about(first) for first in firsts if first is not None),
            escalated=len(siblings) if decision == "escalate" else 0,
        )

    def _audited(self, group: KnownGroup, siblings: Sequence[int]) -> CascadeEvent | None:
        """The audit of some siblings. None while the second judge hasn't answered for one of them."""
        pairs = [
            (group.get_settled(self.first, sibling), group.get_settled(self.then, sibling)) for sibling in siblings
        ]
        if any(good is None for _, good in pairs):
            return None
        both = [
            (cheap.outcome, good.outcome)
            for cheap, good in pairs
            if isinstance(cheap, Verdict) and isinstance(good, Verdict)
        ]
        return CascadeEvent(
            cascade=self.name,
            audited=len(both),
            error=sum(abs(cheap - good) for cheap, good in both),
            flipped=sum(reaches(cheap, self.pass_at) != reaches(good, self.pass_at) for cheap, good in both),
        )
