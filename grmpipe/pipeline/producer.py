"""From prompts to judged groups: admits, plays, judges, ends groups at their deadline."""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack
from operator import attrgetter
from typing import TypeVar

from grmpipe.data.stream import EndOfData, NothingToJudge
from grmpipe.envs.episode_slots import Booking
from grmpipe.envs.play import RolloutAborted, RolloutRequest
from grmpipe.envs.retry_episode import EpisodeFailed
from grmpipe.judge.verdict import only_finite
from grmpipe.models.seeds import derive_seed, first_name
from grmpipe.models.types import BudgetSpent, EngineRefused
from grmpipe.pipeline.counters import FlowCounters
from grmpipe.pipeline.group import Group
from grmpipe.pipeline.group_buffer import GroupBuffer
from grmpipe.pipeline.health import FlowHealth
from grmpipe.pipeline.interfaces import KILLED_ENGINES, FlowConfig, PipelineComponents, RecoveredGroup, RolloutTimes
from grmpipe.pipeline.why_waiting import why_waiting
from grmpipe.scheduler.clock import ActiveClock, PauseGate
from grmpipe.scheduler.routing.router import RequestKillsEngines
from grmpipe.scheduler.work_queue import BusyMeter, Stage
from grmpipe.types import JudgeReport, JudgeSession, JudgeTask, Prompt, Rollout, Verdict, judge_tasks_of_turn

log = logging.getLogger(__name__)

WEIGHT_OF_LATEST = 1 / 8  # in a running mean, from the 8th rollout on: a policy in training changes


class ExpectedLengths:
    """Running means of the lengths of rollouts: by prompt, by source, and over all."""

    def __init__(self) -> None:
        self._prompts: dict[str, RunningMean] = {}  # by prompt_id
        self._sources: dict[str, RunningMean] = {}
        self._all = RunningMean()

    def __getitem__(self, prompt: Prompt) -> float:
        """Expected tokens: the mean of the prompt's rollouts; without any, of its source's; without these, of all."""
        known = self._prompts.get(prompt.prompt_id) or self._sources.get(prompt.source) or self._all
        return known.mean

    def record(self, prompt: Prompt, rollout: Rollout) -> None:
        """A rollout ended."""
        num_tokens = rollout.num_sampled_tokens
        for means, key in ((self._prompts, prompt.prompt_id), (self._sources, prompt.source)):
            means.setdefault(key, RunningMean()).add(num_tokens)
        self._all.add(num_tokens)


class RunningMean:
    """A mean that forgets; 0 without any value."""

    __slots__ = ("count", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.mean += max(1 / self.count, WEIGHT_OF_LATEST) * (value - self.mean)


T = TypeVar("T")

UNBOUNDED = 1 << 30
BATCH_TOKENS = 1 << 24  # more than a rollout samples
FIRST = -(1 << 50)  # the priority of rollouts: before all judgements on the same engine


class Producer:
    """Opens groups while there is room, and brings each to its end. The buffer holds them."""

    def __init__(
        self,
        components: PipelineComponents,
        config: FlowConfig,
        buffer: GroupBuffer,
        engines: BusyMeter,
        clock: ActiveClock,
        counters: FlowCounters,
        judge_version: int,
    ) -> None:
        """engines: meter that runs while rollouts or judgements are in flight. clock: the clock of group deadlines."""
        self.judge_version = judge_version
        self.why_paused = ""  # why judging paused for the rest of this process; empty: it didn't
        self._paused = ExitStack()
        self.judging_gate = PauseGate(clock)  # while it is held, no judge task begins
        width = config.rollout_concurrency
        self.playing: Stage[tuple[Group, int]] = Stage(
            "play",
            self._play,
            lambda item: item[0].group_id,
            width=width,
            bound=width,
            rank=lambda item: self._play_priority(item[0]),
            shared_meter=engines,
        )
        self.judging: Stage[tuple[Group, JudgeSession, JudgeTask]] = Stage(
            "judge",
            self._judge,
            lambda item: item[0].group_id,
            width=config.judge_concurrency,
            bound=0,  # unbounded: the waiting are ranked, and admission limits their number
            rank=lambda item: self._rank(item[0], item[2]),
            shared_meter=engines,
        )
        self.expiring: Stage[Group] = Stage("expire", self._expire, attrgetter("group_id"), width=UNBOUNDED, bound=0)
        self._health = FlowHealth(config)
        self._slots: dict[str, Booking] = {}  # open groups', by group_id
        self._components = components
        self._config = config
        self._buffer = buffer
        self._clock = clock
        self._now = asyncio.get_running_loop().time
        self._counters = counters
        self._lengths = ExpectedLengths()
        self._num_judging = 0  # judge tasks in progress
        self._skipped: set[str] = set()  # prompt_ids that were reported as too long

    # -- admit ---------------------------------------------------------------------------------------------------------

    async def admit(self) -> None:
        """Open groups until the prompts are over."""
        # Reopened groups come first: their tokens are the oldest. They need no room: they had it before the resume.
        for prompt_index in self._buffer.ledger.prompts_to_reopen:
            try:
                prompt = self._components.prompts.at(prompt_index)
            except NothingToJudge:
                self._buffer.ledger.skip(prompt_index)
                continue
            await self._open(prompt_index, prompt, await self._components.slots.book(self._config.group_size))
        while True:
            await self._components.judge_guard.until_fit(self._clock)
            await self._buffer.until_room()
            await self._health.until_fit(self._clock)
            slots = await self._components.slots.book(self._config.group_size)
            prompt_index = self._buffer.ledger.next_prompt_index
            try:
                prompt = self._components.prompts.at(prompt_index)
            except EndOfData:
                slots.end()
                self._buffer.no_more_prompts()
                return
            except NothingToJudge:
                slots.end()
                self._buffer.ledger.skip(prompt_index)
                continue
            await self._open(prompt_index, prompt, slots)

    async def _open(self, prompt_index: int, prompt: Prompt, slots: Booking) -> None:
        """Open the group of a prompt with its recovered work, and send its other siblings to play. `slots`: one for
        each sibling.
        """
        group, kept = self._buffer.open(prompt_index, prompt)
        self._slots[group.group_id] = slots
        if self._components.too_long(prompt):
            # The first time is for the console, those of later epochs are for run.log.
            level = logging.INFO if prompt.prompt_id in self._skipped else logging.WARNING
            log.log(level, "prompt %s is longer than the model's context window: skipped", prompt.prompt_id)
            self._skipped.add(prompt.prompt_id)
            self._fail(group, "prompt_too_long")
            return
        if kept.killed_engines:
            self._fail(group, KILLED_ENGINES, "before the resume")
            return
        group.set_deadline(self._clock.now())
        # Before its siblings, whose inbox is bounded: a group whose siblings wait for a place has a deadline, too.
        await self.expiring.put(group)
        await self._open_session(group, kept)
        missing = group.list_missing_rollouts()
        slots.keep(len(missing))
        for sibling in missing:
            await self.playing.put((group, sibling))

    async def _open_session(self, group: Group, kept: RecoveredGroup) -> None:
        """Open a group's judge session: add recovered verdicts, and queue judge tasks for rollouts without one."""
        session = group.session = self._components.judge.open(group.prompt, group.group_id, group.size)
        to_judge = [*session.begin()]
        is_whole = len(kept.reports) == group.size
        holds = is_whole or not self._config.keeps_whole_groups  # else the verdicts would come from two judgings
        reports = kept.reports if holds and are_valid(kept.reports, self.judge_version, is_whole=is_whole) else {}
        for rollout in kept.rollouts:
            self._buffer.add_rollout(group, rollout, journalled=not kept.renamed)
            to_judge += session.add(rollout)
            if (report := reports.get(rollout.sibling)) is not None:
                self._buffer.add_report(group, rollout.sibling, report, journalled=not kept.renamed)
        if not group.is_open:
            self._ended(group)
            return
        for judge_task in to_judge:
            await self.judging.put((group, session, judge_task))

    # -- play ----------------------------------------------------------------------------------------------------------

    async def _play(self, item: tuple[Group, int]) -> None:
        group, sibling = item
        if not group.is_open:
            return
        # By the first name: a group that a resume renamed draws the same numbers as it did before.
        seed = derive_seed(self._config.seed, first_name(f"{group.group_id}/{sibling}"))
        request = RolloutRequest(
            group_id=group.group_id,
            sibling=sibling,
            seed=seed,
            priority=self._play_priority(group),
            on_turn=lambda so_far: self._turn_ended(group, so_far),
        )
        try:
            async with self._slots[group.group_id]:
                began_s = self._now()
                rollout = await self._components.play(
                    request, group.prompt, lambda: group.first_token(self._clock.now())
                )
        except (EngineRefused, RolloutAborted) as error:  # EngineDied means that no engine is left: that ends the run
            log.warning("rollout %s/%d: %s", group.group_id, sibling, error)
            self._fail(group, find_cause(error), str(error))
            return
        except EpisodeFailed as error:
            self._counters.step.envs.episode_failed(error.failures)
            self._fail(group, f"env_{error.failed.cause}", str(error))
            self._health.episode_ended(error.failed)
            return
        self._health.episode_ended(rollout)
        self._lengths.record(group.prompt, rollout)
        if self._config.truncated == "fail" and rollout.status == "truncated":
            self._counters.step.rollout(rollout)
            self._fail(
                group, "rollout_truncated", f"sibling {sibling} was truncated by its {rollout.reason or 'tokens'}"
            )
            return
        if self._buffer.add_rollout(group, rollout):
            group.times[sibling] = RolloutTimes(began_s=began_s, ended_s=self._now())
            self._counters.step.rollout(rollout)
            session = group.session
            assert session is not None, "it is opened before the siblings are sent to play"
            for judge_task in session.add(rollout):
                await self.judging.put((group, session, judge_task))

    def _play_priority(self, group: Group) -> int:
        """The priority of a group's rollouts where they wait, here or for a row of an engine: batches in their order,
        and in each the longest first, since it ends with the last one (LPT: Graham 1969, doi:10.1137/0117039).
        """
        # By length alone a step took up to 1.12 times as long at staleness 1: the next batch overtook the one that is
        # due (benchmarks/scheduling.md).
        return FIRST + group.opened_at * BATCH_TOKENS - round(self._lengths[group.prompt])

    def _turn_ended(self, group: Group, so_far: Rollout) -> None:
        """Queue what an ended turn lets the judge do while the rollout goes on."""
        if (session := group.session) is not None:
            for judge_task in judge_tasks_of_turn(session, so_far):
                self.judging.put_nowait((group, session, judge_task))

    # -- judge ---------------------------------------------------------------------------------------------------------

    async def _judge(self, item: tuple[Group, JudgeSession, JudgeTask]) -> None:
        group, session, judge_task = item
        await self._components.judge_guard.until_fit(self._clock)
        await self.judging_gate.wait_until_free()
        if group.session is not session:  # the group ended, or is judged again
            return
        # A session gives tasks for all rollouts that it gets; verdicts that a resume kept need none.
        if judge_task.members and not group.lacks_verdicts(judge_task.members):
            return
        group.judging_begun = True
        self._num_judging += 1
        try:
            reports = await session.judge(judge_task, self._rank(group, judge_task))
        except BudgetSpent as error:  # no failure of the judge: the group waits for a resume
            self._pause_judging(str(error))
            return
        finally:
            self._num_judging -= 1
        for sibling, found in reports.items():
            # Checked before the group has it: one nan in a baseline would reach the advantages of all siblings.
            report = with_version(only_finite(found), self.judge_version)
            if self._buffer.add_report(group, sibling, report):
                if (times := group.times.get(sibling)) is not None:
                    times.judged_s = self._now()
                self._counters.step.report(report)
                if not group.is_open:
                    self._ended(group)
                if not group.prompt.self_judging:  # a label never fails: it would hide that the judge does
                    self._components.judge_guard.verdict(report)

    def _pause_judging(self, why: str) -> None:
        """No judge task begins in this process any more, and the deadlines of groups stand still. Tasks in progress go
        on: each ends, or comes here too.
        """
        if not self.why_paused:
            self.why_paused = why
            self._paused.enter_context(self.judging_gate.hold())
            self._buffer.news.set()

    def _rank(self, group: Group, judge_task: JudgeTask) -> int:
        """The rank of a judge task; the lowest is served first. Groups that are due in an earlier batch come first,
        then those that lack fewer verdicts, then older ones. One more degree of urgency overtakes `groups_per_batch`
        groups. A turn of a rollout that still goes on comes after all verdicts of its batch.
        """
        # Not by length: the longest judgement first took 1.17 times as long at staleness 1, because nearly complete
        # groups had to wait (benchmarks/scheduling.md).
        goes_on = judge_task.turn is not None and not set(group.list_missing_rollouts()).isdisjoint(judge_task.members)
        batches_ahead = self._buffer.batches_ahead(group) + goes_on
        urgency = batches_ahead * group.size + len(group.list_missing_verdicts())
        return rank(arrival=group.prompt_index, urgency=urgency, patience=self._config.groups_per_batch)

    async def change_judge(self, steps: int, change: Callable[[], Awaitable[T]]) -> T:
        """Bring what judges to `steps` more versions. No group is judged by two versions:
        judge tasks in progress are aborted, the verdicts of groups that still lack some are voided, and these groups
        are judged again.
        """
        with self.judging_gate.hold():
            aborted = self._num_judging
            for group in list_being_judged(self._buffer.groups.values()):
                self.judging.cancel(group.group_id)
            report = await change()
            self.judge_version += steps
            voided = 0
            # Listed anew: a group may have been dropped while the weights changed.
            for group in list_being_judged(self._buffer.groups.values()):
                voided += group.void_verdicts()
                await self._open_session(group, RecoveredGroup(group_id=group.group_id, rollouts=tuple(group.rollouts)))
            self._counters.step.aborted += aborted
            self._counters.step.voided += voided
        return report

    # -- end -----------------------------------------------------------------------------------------------------------

    async def _expire(self, group: Group) -> None:
        """End a group at its deadline. The deadline restarts with the group's first token."""
        if not group.is_open:
            return
        reached = -1.0
        while (deadline := group.deadline_s) != reached:  # it moves when the first token comes
            await self._clock.sleep_until(deadline)
            reached = deadline
        why = why_waiting(self._buffer, group.group_id, self._clock.now())
        log.warning("group %s reached its deadline: %s", group.group_id, why)
        late = self._buffer.expire(group)
        self._ended(group)
        # A judge that answers nothing at all fails by these alone.
        for timeout in late:
            self._components.judge_guard.verdict(JudgeReport(verdict=timeout))

    def _fail(self, group: Group, cause: str, detail: str = "") -> None:
        if group.is_open:  # siblings may fail together, with their engine
            self._buffer.drop(group, cause, detail)
            self._ended(group)

    def _ended(self, group: Group) -> None:
        """Cancel all work on a group that is no longer open."""
        # This ends what runs. What still waits in an inbox is recognised when its turn comes.
        for stage in (self.playing, self.judging, self.expiring):
            stage.cancel(group.group_id)
        self._slots.pop(group.group_id).end()
        self._health.group_ended(group)


def are_valid(reports: Mapping[int, JudgeReport], judge_version: int, *, is_whole: bool) -> bool:
    """Whether recovered verdicts are valid: all by the judge's present version, or the whole group's by the same
    earlier one.
    """
    verdicts = [report.verdict for report in reports.values()]
    versions = {verdict.grm_version for verdict in verdicts if isinstance(verdict, Verdict)}
    by_one_before = is_whole and len(versions) == 1 and max(versions) < judge_version
    return versions <= {judge_version} or by_one_before


def list_being_judged(groups: Iterable[Group]) -> list[Group]:
    """Open groups that a judge task has begun on, sorted by id."""
    begun = (group for group in groups if group.is_open and group.judging_begun)
    return sorted(begun, key=lambda group: group.group_id)


def find_cause(error: EngineRefused | RolloutAborted) -> str:
    """The cause of dropping a group for this error."""
    if isinstance(error, RequestKillsEngines):
        return KILLED_ENGINES
    return "rollout_refused" if isinstance(error, EngineRefused) else "rollout_died"


def with_version(report: JudgeReport, judge_version: int) -> JudgeReport:
    """The report with the version of the judge that gave its verdict."""
    if judge_version == 0 or not isinstance(report.verdict, Verdict):
        return report
    return dataclasses.replace(report, verdict=dataclasses.replace(report.verdict, grm_version=judge_version))


def rank(*, arrival: int, urgency: int, patience: int) -> int:
    """The rank of a waiting item; the lowest is served first. `arrival` numbers the groups; urgency 0 is the highest.

    An item that is less urgent by n degrees is overtaken only by the next n * patience arrivals. After these it is
    first, however many more come.
    """
    return arrival + patience * urgency
