"""The judge session of several judges: asks those that the composition needs, when it needs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from grmpipe.config.judge import Scale
from grmpipe.judge.composition.cascade import Cascade, EventKey
from grmpipe.judge.composition.combine import on_scale
from grmpipe.judge.composition.outcome import KnownGroup, Part, Pending
from grmpipe.judge.composition.share_bound import ShareBounds
from grmpipe.judge.pointwise_adapter import NOT_TAKEN
from grmpipe.judge.verdict import only_finite, unjudged
from grmpipe.types import (
    CascadeEvent,
    Failed,
    Judge,
    JudgeReport,
    JudgeSession,
    JudgeTask,
    Prompt,
    Rollout,
    Verdict,
    judge_tasks_of_turn,
)
from scheduler.supervise import raising_first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What the sessions of all groups share.

    parts:     all parts of the root, itself included.
    judges:    by name, in the order in which the composition names them.
    comparing: those of them that see siblings next to each other: they get the whole group.
    scale:     of the scores that the verdicts show: the first judge's.
    waits:     whether a sibling's reward may depend on its siblings' verdicts.
    """

    root: Part
    parts: Sequence[Part]
    judges: Mapping[str, Judge]
    comparing: frozenset[str]
    scale: Scale
    waits: bool


class CompositionSession:
    """The sessions of all judges of a group. Each is opened when its judge is first asked, and once.

    A judge of single responses gets the siblings of which it is asked, a comparing one all of them. What a report makes
    necessary is done in the same `judge` call, all at once; rollouts that end later bring their tasks with `add`.
    """

    def __init__(
        self,
        composition: Composition,
        prompt: Prompt,
        group_id: str,
        size: int,
        skill: Mapping[str, float],
        bounds: ShareBounds,
    ) -> None:
        self._composition = composition
        root, comparing = composition.root, composition.comparing
        self._group = KnownGroup(prompt, group_id, size, root, comparing, skill, bounds)
        self._sessions: dict[str, JudgeSession] = {}
        self._given: set[tuple[str, int]] = set()  # (judge, sibling): rollouts that sessions have
        self._taken: set[tuple[str, int]] = set()  # (judge, sibling): siblings that tasks bring nearer to a verdict
        self._reported: set[int] = set()  # siblings whose reports were given
        self._late: dict[str, list[JudgeReport]] = {}  # judge -> its reports on siblings whose report was given before
        self._recorded: set[EventKey] = set()

    # -- as a judge session ------------------------------------------------------------------------------------------

    def begin(self) -> Sequence[JudgeTask]:
        outcome = self._group.outcome(self._composition.root, 0)
        asks = outcome.asks if isinstance(outcome, Pending) else ()
        return [judge_task for judge in asks for judge_task in self._opened(judge)]

    def add_turn(self, so_far: Rollout) -> Sequence[JudgeTask]:
        """The tasks of those judges that judge turns and are asked whatever others say: not of one behind a gate."""
        outcome = self._group.outcome(self._composition.root, so_far.sibling)
        found: list[JudgeTask] = []
        for judge in outcome.asks if isinstance(outcome, Pending) else ():
            found += self._opened(judge)
            found += [self._task(judge, part) for part in judge_tasks_of_turn(self._sessions[judge], so_far)]
        return found

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        self._group.rollouts[rollout.sibling] = rollout
        asked = self._asked()
        ended = [] if asked else self._final()
        return [*asked, JudgeTask(members=tuple(ended))] if ended else asked

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        await self._do(judge_task, priority)
        return {sibling: self._report(sibling) for sibling in self._final()}

    # -- asking ------------------------------------------------------------------------------------------------------

    async def _do(self, judge_task: JudgeTask, priority: int) -> None:
        """Do a task of a judge, and then all that its reports make necessary."""
        if judge_task.part is None:
            return
        reports = await self._sessions[judge_task.judge].judge(judge_task.part, priority)
        for sibling, report in reports.items():
            self._take_report(judge_task.judge, sibling, only_finite(report))
        async with raising_first() as tasks:
            for following in self._asked():
                tasks.create_task(self._do(following, priority))

    def _take_report(self, judge: str, sibling: int, report: JudgeReport) -> None:
        self._group.reports.setdefault(judge, {})[sibling] = report
        if sibling in self._reported:
            self._late.setdefault(judge, []).append(report)

    def _asked(self) -> list[JudgeTask]:
        """The tasks that are possible and necessary now and weren't before."""
        found: list[JudgeTask] = []
        for sibling in sorted(self._group.rollouts.keys() - self._reported):
            outcome = self._group.outcome(self._composition.root, sibling)
            for judge in outcome.asks if isinstance(outcome, Pending) else ():
                found += [*self._opened(judge), *self._given_to(judge, sibling)]
        return [*found, *self._asked()] if self._fail_untaken() else found

    def _fail_untaken(self) -> bool:
        """Fail what a comparing judge never reports on: siblings for which it has no task, although it has the whole
        group, such as a response without siblings. Returns whether there are any.
        """
        whole = range(self._group.size)
        untaken = [
            (judge, sibling)
            for judge in self._composition.comparing & self._sessions.keys()
            if self._given.issuperset((judge, one) for one in whole)
            for sibling in whole
            if (judge, sibling) not in self._taken
        ]
        for judge, sibling in untaken:
            self._taken.add((judge, sibling))
            self._take_report(judge, sibling, NOT_TAKEN)
        return bool(untaken)

    def _opened(self, judge: str) -> list[JudgeTask]:
        """Open a judge's session, unless it is open. Returns the tasks that need no rollout."""
        if judge in self._sessions:
            return []
        group = self._group
        session = self._composition.judges[judge].open(group.prompt, group.group_id, group.size)
        self._sessions[judge] = session
        return [self._task(judge, part) for part in session.begin()]

    def _given_to(self, judge: str, sibling: int) -> list[JudgeTask]:
        """Give a judge the rollout, or all rollouts if it compares, as far as it lacks them."""
        wanted = sorted(self._group.rollouts) if judge in self._composition.comparing else [sibling]
        lacking = [one for one in wanted if (judge, one) not in self._given]
        self._given |= {(judge, one) for one in lacking}
        parts = [part for one in lacking for part in self._sessions[judge].add(self._group.rollouts[one])]
        return [self._task(judge, part) for part in parts]

    def _task(self, judge: str, part: JudgeTask) -> JudgeTask:
        """A judge's task as one of the group. It is skipped only if no verdict that may depend on it is missing."""
        self._taken |= {(judge, sibling) for sibling in part.members}
        depend = self._composition.waits or judge in self._composition.comparing
        members = tuple(range(self._group.size)) if depend and part.members else part.members
        return JudgeTask(members=members, turn=part.turn, judge=judge, part=part)

    # -- reporting ---------------------------------------------------------------------------------------------------

    def _final(self) -> list[int]:
        """Siblings with a final outcome whose report wasn't given yet."""
        waiting = sorted(self._group.rollouts.keys() - self._reported)
        root = self._composition.root
        return [sibling for sibling in waiting if not isinstance(self._group.outcome(root, sibling), Pending)]

    def _report(self, sibling: int) -> JudgeReport:
        """The report on a sibling, given once."""
        self._reported.add(sibling)
        outcome = self._group.outcome(self._composition.root, sibling)
        assert not isinstance(outcome, Pending), sibling
        by_judge = self._by_judge(sibling)
        if isinstance(outcome, Failed) and not by_judge:
            return unjudged(outcome)
        reports = list(by_judge.values())
        verdict = outcome if isinstance(outcome, Failed) else self._shown(outcome, sibling)
        audit = next((report.audit for report in reports if report.audit is not None), None)
        whole = JudgeReport(verdict=verdict, audit=audit, by_judge=by_judge, cascades=self._new_events())
        return with_evidence(whole, reports)

    def _new_events(self) -> tuple[CascadeEvent, ...]:
        """What the cascades have done since the last report of the group."""
        cascades = [part for part in self._composition.parts if isinstance(part, Cascade)]
        found = {key: event for cascade in cascades for key, event in cascade.events(self._group).items()}
        new = {key: event for key, event in found.items() if key not in self._recorded}
        self._recorded |= new.keys()
        return tuple(new.values())

    def _by_judge(self, sibling: int) -> dict[str, JudgeReport]:
        """The judges' own reports on a sibling, with the evidence that came too late for others."""
        own = {
            judge: reports[sibling]
            for judge in self._composition.judges
            if sibling in (reports := self._group.reports.get(judge, {}))
        }
        return {judge: with_evidence(report, self._late.pop(judge, [])) for judge, report in own.items()}

    def _shown(self, verdict: Verdict, sibling: int) -> Verdict:
        """A verdict as people read it: on the first judge's scale, with the reward of every part."""
        inner = [part for part in self._composition.parts if part is not self._composition.root]
        settled = {part.name: self._group.settled(part, sibling) for part in inner}
        breakdown = {name: one.outcome for name, one in settled.items() if isinstance(one, Verdict)}
        return on_scale(verdict, self._composition.scale, breakdown)


def with_evidence(report: JudgeReport, others: Sequence[JudgeReport]) -> JudgeReport:
    """The report with the judgements, failures and tokens of others besides its own."""
    if not others:
        return report
    every = [report, *others]
    return dataclasses.replace(
        report,
        judgements=tuple(judgement for one in every for judgement in one.judgements),
        failures=tuple(failure for one in every for failure in one.failures),
        principles=next((one.principles for one in every if one.principles is not None), None),
        saved_tokens=sum(one.saved_tokens for one in every),
    )
