"""Several judges as one: its session asks those that the composition needs, when it needs them."""

import dataclasses
from collections.abc import Mapping, Sequence

from grmpipe.config.judge import Scale
from grmpipe.judge.calibration import UNCALIBRATED
from grmpipe.judge.composition.cascade import Cascade, EventKey
from grmpipe.judge.composition.combine_verdicts import MeasuredSkill, on_scale
from grmpipe.judge.composition.outcome import KnownGroup, RewardPart, Unsettled, walk
from grmpipe.judge.composition.share_bound import ShareBounds
from grmpipe.judge.pointwise_adapter import NOT_TAKEN
from grmpipe.judge.verdict import only_finite, report_failures
from grmpipe.scheduler.run_together import raise_first_failure
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComposedJudge:
    """Several judges as one.

    judges:    by name, in the order in which the composition names them.
    comparing: those of them that see siblings next to each other: they get the whole group.
    scale:     the first judge's, on which the verdicts show their scores.
    waits:     whether a sibling's reward may depend on its siblings' verdicts.
    skill:     measured by evaluations, for juries that are weighted by it.
    bounds:    keep the shares of cascades, over all groups.
    """

    root: RewardPart
    judges: Mapping[str, Judge]
    comparing: frozenset[str]
    scale: Scale
    waits: bool
    skill: MeasuredSkill = dataclasses.field(default_factory=MeasuredSkill)
    bounds: ShareBounds = dataclasses.field(default_factory=ShareBounds)

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        return CompositionSession(self, prompt, group_id, size)


class AskedJudges:
    """The sessions of a group's judges, and their tasks. Each is opened when its judge is first asked, and once."""

    def __init__(self, composed: ComposedJudge, group: KnownGroup) -> None:
        self._composed = composed
        self._group = group
        self._sessions: dict[str, JudgeSession] = {}
        self._given: set[tuple[str, int]] = set()  # (judge, sibling): rollouts that sessions have
        self._taken: set[tuple[str, int]] = set()  # (judge, sibling): siblings that tasks bring nearer to a verdict

    def open(self, judge: str) -> list[JudgeTask]:
        """Open a judge's session, unless it is open. Returns the tasks that need no rollout."""
        if judge in self._sessions:
            return []
        group = self._group
        session = self._composed.judges[judge].open(group.prompt, group.group_id, group.size)
        self._sessions[judge] = session
        return [self._task(judge, part) for part in session.begin()]

    def add_turn(self, judge: str, so_far: Rollout) -> list[JudgeTask]:
        return [self._task(judge, part) for part in judge_tasks_of_turn(self._sessions[judge], so_far)]

    def give(self, judge: str, sibling: int) -> list[JudgeTask]:
        """Give a judge the rollout, or all rollouts if it compares, as far as it lacks them."""
        wanted = sorted(self._group.rollouts) if judge in self._composed.comparing else [sibling]
        lacking = [one for one in wanted if (judge, one) not in self._given]
        self._given |= {(judge, one) for one in lacking}
        parts = [part for one in lacking for part in self._sessions[judge].add(self._group.rollouts[one])]
        return [self._task(judge, part) for part in parts]

    async def judge(self, judge: str, part: JudgeTask, priority: int) -> Mapping[int, JudgeReport]:
        return await self._sessions[judge].judge(part, priority)

    def take_untaken(self) -> list[tuple[str, int]]:
        """(judge, sibling), each once: what a comparing judge never reports on, because it has no task for it although
        it has the whole group, such as a response without siblings.
        """
        whole = range(self._group.size)
        untaken = [
            (judge, sibling)
            for judge in self._composed.comparing & self._sessions.keys()
            if self._given.issuperset((judge, one) for one in whole)
            for sibling in whole
            if (judge, sibling) not in self._taken
        ]
        self._taken |= set(untaken)
        return untaken

    def _task(self, judge: str, part: JudgeTask) -> JudgeTask:
        """A judge's task as one of the group. It is skipped only if no verdict that may depend on it is missing."""
        self._taken |= {(judge, sibling) for sibling in part.members}
        depend = self._composed.waits or judge in self._composed.comparing
        members = tuple(range(self._group.size)) if depend and part.members else part.members
        return JudgeTask(members=members, turn=part.turn, judge=judge, part=part)


class CompositionSession:
    """The judging of a group by all judges that the composition needs.

    A judge of single responses gets the siblings of which it is asked, a comparing one all of them. What a report makes
    necessary is done in the same `judge` call, all at once; rollouts that end later bring their tasks with `add`.
    """

    def __init__(self, composed: ComposedJudge, prompt: Prompt, group_id: str, size: int) -> None:
        self._composed = composed
        self._cascades = [part for part in walk(composed.root) if isinstance(part, Cascade)]
        skill = composed.skill.weights()
        self._group = KnownGroup(prompt, group_id, size, composed.root, composed.comparing, skill, composed.bounds)
        self._judges = AskedJudges(composed, self._group)
        self._reported: set[int] = set()  # siblings whose reports were given
        self._late: dict[str, list[JudgeReport]] = {}  # judge -> its reports on siblings whose report was given before
        self._recorded: set[EventKey] = set()

    # -- as a judge session ------------------------------------------------------------------------------------------

    def begin(self) -> Sequence[JudgeTask]:
        return [judge_task for judge in self._asks(0) for judge_task in self._judges.open(judge)]

    def add_turn(self, so_far: Rollout) -> Sequence[JudgeTask]:
        """The tasks of those judges that judge turns and are asked whatever others say: not of one behind a gate."""
        found: list[JudgeTask] = []
        for judge in self._asks(so_far.sibling):
            found += [*self._judges.open(judge), *self._judges.add_turn(judge, so_far)]
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
        reports = await self._judges.judge(judge_task.judge, judge_task.part, priority)
        for sibling, report in reports.items():
            self._take_report(judge_task.judge, sibling, only_finite(report))
        async with raise_first_failure() as tasks:
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
            for judge in self._asks(sibling):
                found += [*self._judges.open(judge), *self._judges.give(judge, sibling)]
        untaken = self._judges.take_untaken()
        for judge, sibling in untaken:
            self._take_report(judge, sibling, NOT_TAKEN)
        return [*found, *self._asked()] if untaken else found

    def _asks(self, sibling: int) -> Sequence[str]:
        """The judges that the sibling's outcome needs and that have not reported on it."""
        outcome = self._group.outcome(self._composed.root, sibling)
        return outcome.asks if isinstance(outcome, Unsettled) else ()

    # -- reporting ---------------------------------------------------------------------------------------------------

    def _final(self) -> list[int]:
        """Siblings with a final outcome whose report wasn't given yet."""
        waiting = sorted(self._group.rollouts.keys() - self._reported)
        root = self._composed.root
        return [sibling for sibling in waiting if not isinstance(self._group.outcome(root, sibling), Unsettled)]

    def _report(self, sibling: int) -> JudgeReport:
        """The report on a sibling, given once, with the judges' own and the evidence that came too late for others."""
        self._reported.add(sibling)
        outcome = self._group.outcome(self._composed.root, sibling)
        assert not isinstance(outcome, Unsettled), sibling
        own = {judge: reports[sibling] for judge, reports in self._group.reports.items() if sibling in reports}
        in_order = {judge: own[judge] for judge in self._composed.judges if judge in own}
        by_judge = {judge: with_evidence(report, self._late.pop(judge, [])) for judge, report in in_order.items()}
        if isinstance(outcome, Failed) and not by_judge:
            return report_failures(outcome)
        reports = list(by_judge.values())
        verdict = outcome
        if isinstance(verdict, Verdict):
            verdict = show_verdict(verdict, sibling, self._group, self._composed)
            said = {name: one.verdict.breakdown for name, one in own.items() if isinstance(one.verdict, Verdict)}
            raw = {f"{name}/{UNCALIBRATED}": one[UNCALIBRATED] for name, one in said.items() if UNCALIBRATED in one}
            verdict = dataclasses.replace(verdict, breakdown={**verdict.breakdown, **raw})
        audit = next((report.audit for report in reports if report.audit is not None), None)
        whole = JudgeReport(verdict=verdict, audit=audit, by_judge=by_judge, cascades=self._new_events())
        return with_evidence(whole, reports)

    def _new_events(self) -> tuple[CascadeEvent, ...]:
        """What the cascades have done since the last report of the group."""
        found = {key: event for cascade in self._cascades for key, event in cascade.events(self._group).items()}
        new = {key: event for key, event in found.items() if key not in self._recorded}
        self._recorded |= new.keys()
        return tuple(new.values())


def show_verdict(verdict: Verdict, sibling: int, group: KnownGroup, composed: ComposedJudge) -> Verdict:
    """A verdict as people read it: on the first judge's scale, with the reward of every part."""
    settled = {part.name: group.get_settled(part, sibling) for part in walk(composed.root) if part is not composed.root}
    breakdown = {name: one.outcome for name, one in settled.items() if isinstance(one, Verdict)}
    return on_scale(verdict, composed.scale, breakdown)


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
