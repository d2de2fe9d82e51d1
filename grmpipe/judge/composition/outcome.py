"""What is known of a group's verdicts, and the outcome of a part of the composition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from grmpipe.judge.composition.share_bound import ShareBounds
from grmpipe.types import Failed, JudgeReport, Prompt, Rollout, Verdict

Decision = Literal["keep", "escalate", "audit"]  # what a cascade decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsettled:
    """No outcome so far. asks: judges that are needed for it, and have not reported on the sibling."""

    asks: tuple[str, ...] = ()


Outcome = Verdict | Failed | Unsettled


class RewardPart(Protocol):
    """A part of a composition: a judge, or what is made of the outcomes of other parts.

    Within the composition a verdict's score and its standard deviation are in reward units, whatever scales its judges
    have.
    """

    @property
    def name(self) -> str: ...

    @property
    def parts(self) -> Sequence[RewardPart]:
        """What it is made of; none for a judge."""
        ...

    def outcome(self, group: KnownGroup, sibling: int) -> Outcome:
        """The sibling's outcome by what is known. An outcome that isn't pending never changes."""
        ...

    def needs(self, part: RewardPart, group: KnownGroup, sibling: int) -> bool | None:
        """Whether the sibling's outcome needs that of this one of `parts`. None: not known so far."""
        ...


class KnownGroup:
    """All that is known of a group while it is judged: rollouts, reports, and what follows from them.

    root:      the composition whose outcome is the sibling's.
    comparing: judges that see siblings next to each other: they have reported on a sibling once they have reported on
               all.
    skill:     weights of judges by their measured accuracy; they stay the same for the whole group.
    bounds:    keep the shares of cascades; other groups have the same object.
    """

    def __init__(
        self,
        prompt: Prompt,
        group_id: str,
        size: int,
        root: RewardPart,
        comparing: frozenset[str] = frozenset(),
        skill: Mapping[str, float] | None = None,
        bounds: ShareBounds | None = None,
    ) -> None:
        self.prompt = prompt
        self.group_id = group_id
        self.size = size
        self.skill = skill or {}
        self.bounds = bounds or ShareBounds()
        self.rollouts: dict[int, Rollout] = {}
        self.reports: dict[str, dict[int, JudgeReport]] = {}  # judge -> sibling -> report
        self.decisions: dict[tuple[str, int | None], Decision] = {}
        self._root = root
        self._comparing = comparing
        self._inside: dict[str, frozenset[str]] = {}  # part -> the names of all that it is made of, its own included
        self._settled: dict[tuple[str, int], Verdict | Failed] = {}

    def verdict(self, judge: str, sibling: int) -> Verdict | Failed | None:
        """The judge's verdict on a sibling. None if it has not reported."""
        reports = self.reports.get(judge, {})
        if judge in self._comparing and len(reports) < self.size:
            return None
        report = reports.get(sibling)
        return None if report is None else report.verdict

    def outcome(self, part: RewardPart, sibling: int) -> Outcome:
        """The sibling's outcome of a part, found once."""
        if (settled := self._settled.get((part.name, sibling))) is not None:
            return settled
        outcome = part.outcome(self, sibling)
        if not isinstance(outcome, Unsettled):
            self._settled[part.name, sibling] = outcome
        return outcome

    def get_settled(self, part: RewardPart, sibling: int) -> Verdict | Failed | None:
        """The outcome, if it has been found. Unlike `outcome` it never lets a cascade decide."""
        return self._settled.get((part.name, sibling))

    def outcomes(self, part: RewardPart, siblings: Sequence[int]) -> list[Verdict | Failed] | None:
        """The siblings' outcomes, in their order. None while one is pending."""
        found: list[Verdict | Failed] = []
        for sibling in siblings:
            if isinstance(outcome := self.outcome(part, sibling), Unsettled):
                return None
            found.append(outcome)
        return found

    def find_siblings(self, part: RewardPart) -> list[int] | None:
        """The siblings whose verdict needs a part: what a gate vetoes needs nothing behind it. None while that isn't
        known of one.
        """
        found: list[int] = []
        for sibling in range(self.size):
            if (needed := self._leads_to(self._root, part, sibling)) is None:
                return None
            found += [sibling] * needed
        return found

    def _leads_to(self, above: RewardPart, part: RewardPart, sibling: int) -> bool | None:
        """Whether the sibling's outcome of `above` needs that of `part`. None: not known so far."""
        if above is part:
            return True
        is_open = False
        for inner in above.parts:
            if part.name not in self._names_inside(inner) or (needed := above.needs(inner, self, sibling)) is False:
                continue
            leads = self._leads_to(inner, part, sibling) if needed else None
            if leads:
                return True
            is_open |= leads is None
        return None if is_open else False

    def _names_inside(self, part: RewardPart) -> frozenset[str]:
        if part.name not in self._inside:
            self._inside[part.name] = frozenset(one.name for one in walk(part))
        return self._inside[part.name]

    def decision(self, cascade: str, sibling: int | None, decide: Callable[[], Decision]) -> Decision:
        """A cascade's decision about a sibling, or about all of them (None), made once."""
        if (cascade, sibling) not in self.decisions:
            self.decisions[cascade, sibling] = decide()
        return self.decisions[cascade, sibling]


def walk(part: RewardPart) -> list[RewardPart]:
    """The part and all that it is made of, each name once, in order."""
    found = {part.name: part}
    for inner in part.parts:
        found |= {one.name: one for one in walk(inner) if one.name not in found}
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The outcomes of several parts for one sibling, by their names, when none is pending."""

    verdicts: Mapping[str, Verdict]
    failures: Mapping[str, Failed]

    @property
    def first_failure(self) -> Failed | None:
        return next(iter(self.failures.values()), None)


def collect_outcomes(group: KnownGroup, parts: Sequence[RewardPart], sibling: int) -> Answered | Unsettled:
    """The outcomes of all parts. While some are pending, the judges that all of them need: they are asked together."""
    verdicts: dict[str, Verdict] = {}
    failures: dict[str, Failed] = {}
    asks: dict[str, None] = {}
    is_pending = False
    for part in parts:
        outcome = group.outcome(part, sibling)
        if isinstance(outcome, Unsettled):
            is_pending = True
            asks |= dict.fromkeys(outcome.asks)
        elif isinstance(outcome, Failed):
            failures[part.name] = outcome
        else:
            verdicts[part.name] = outcome
    return Unsettled(asks=tuple(asks)) if is_pending else Answered(verdicts=verdicts, failures=failures)
