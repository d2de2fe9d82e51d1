"""The flow, and nothing else. One loop for synchronous and asynchronous training.

    prompts -> [admit] -> play -> judge -> (group ends) -> train: take .. take, step -> push weights -> [release]
                  ^                                                                                        |
                  +----------------------------------------------------------------------------------------+

admit   consumes prompts,  produces open groups;         waits for room (admission) and for the judge to be fit.
play    consumes siblings, produces rollouts;            waits for the policy's engines.
judge   consumes rollouts, produces verdicts;            waits for the GRM's engines; sits when its members are there.
expire  consumes nothing,  ends groups at their deadline.
train   consumes groups,   produces steps and versions;  waits for groups, oldest first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from grmpipe.data.stream import EndOfData
from grmpipe.flow import Cut, FlowConfig, Kept, Parts, StepReport
from grmpipe.hold import Hold
from grmpipe.rollout.group import Group
from grmpipe.rollout.play import Seat
from grmpipe.tally import Tally, without_signal
from grmpipe.types import Hearing, JudgedGroup, JudgeReport, Prompt, Rollout, Sitting, Verdict
from grmpipe.waits import Waits
from models.seeds import derive_seed
from models.types import EngineRefused
from scheduler.admission import Admission
from scheduler.clock import ActiveClock
from scheduler.ranking import rank
from scheduler.stream import Stage
from scheduler.supervise import run_until
from scheduler.weight_sync import SyncReport

log = logging.getLogger(__name__)

SHOWN_FROM_S = 1e-3  # a group that only waits to be packed costs the learner no time worth a span


class Interrupted(Exception):
    """Somebody asked the run to stop between two optimizer steps."""


class Pipeline:
    """Runs the flow from a cut until `num_steps` are done, the prompts are over, or somebody interrupts."""

    def __init__(
        self,
        parts: Parts,
        config: FlowConfig,
        after_step: Callable[[StepReport], Awaitable[None]],
        cut: Cut | None = None,
        kept: Mapping[int, Kept] | None = None,
    ) -> None:
        """`kept` holds, by draw, the work that a resume found."""
        cut = cut or Cut()
        self._loop = asyncio.get_running_loop()
        self.parts = parts
        self.config = config
        self.clock = ActiveClock()
        self.tally = Tally()
        self.waits = Waits(config.max_staleness)
        self.admission = Admission(
            groups_per_batch=config.groups_per_batch,
            max_staleness=config.max_staleness,
            last_version=config.num_steps,
            version=cut.version,
            dropped=cut.dropped,
        )
        self.playing: Stage[tuple[Group, int]] = Stage(
            "play",
            self._play,
            lambda item: item[0].group_id,
            width=config.play_width,
            bound=config.play_width,
            shared_meter=self.waits.engines,
        )
        self.judging: Stage[tuple[Group, Hearing, Sitting]] = Stage(
            "judge",
            self._judge,
            lambda item: item[0].group_id,
            width=config.judge_width,
            bound=0,  # all: who waits is ranked, and admission bounds them
            rank=lambda item: self._rank(item[0]),
            shared_meter=self.waits.engines,
        )
        self.expiring: Stage[Group] = Stage(
            "expire", self._expire, lambda group: group.group_id, width=1 << 30, bound=0
        )
        self.max_staleness_trained = cut.max_staleness_trained
        self.judge_version = cut.judge_version
        self.judging_hold = Hold(self.clock)  # while it is held no sitting begins
        self._after_step = after_step
        self._kept = dict(kept or {})
        self._to_restore = dict(sorted(cut.in_flight.items()))  # draw -> group_id
        self._next_draw = cut.next_draw
        self._groups: dict[str, Group] = {}  # open or ready or in the batch: all that are in flight
        self._hearings: dict[str, Hearing] = {}  # of open groups
        self._begun: set[str] = set()  # of these, where the judge has begun
        self._num_sitting = 0  # sittings under way
        self._deadlines: dict[str, float] = {}
        self._running: set[str] = set()  # groups whose first token came
        self._ready: dict[str, JudgedGroup] = {}  # by group_id, in order of arrival
        self._unweighed: list[str] = []  # ready, their age not looked at since they came or since the last step
        self._batch: list[JudgedGroup] = []
        self._num_resampled = 0  # groups without signal that were dropped since the last step
        self._news = asyncio.Event()  # a group ended, or the run is to stop
        self._room = asyncio.Event()
        self._room.set()
        self._prompts_over = False
        self._interrupted = False

    @property
    def version(self) -> int:
        return self.admission.version

    @property
    def open_batch(self) -> tuple[JudgedGroup, ...]:
        """Groups that were taken and not stepped."""
        return tuple(self._batch)

    def cut(self) -> Cut:
        """The flow as it stands. Groups taken into the open batch count as in flight: they weren't stepped."""
        return Cut(
            version=self.version,
            next_draw=self._next_draw,
            in_flight=self._to_restore | {group.draw: group.group_id for group in self._groups.values()},
            dropped=dict(self.admission.dropped),
            max_staleness_trained=self.max_staleness_trained,
            judge_version=self.judge_version,
        )

    def interrupt(self) -> None:
        """Stop at the next place between two steps: `run` raises Interrupted."""
        self._interrupted = True
        self._news.set()

    async def run(self) -> None:
        """Returns when all steps are done or the prompts are over. The first crash of any stage ends it, as itself."""
        try:
            await run_until(
                self._train(),
                admit=self._admit(),
                play=self.playing.run(),
                judge=self.judging.run(),
                expire=self.expiring.run(),
            )
        except EndOfData:
            await self._give_up_rest()

    # -- admit -------------------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        for draw in list(self._to_restore):
            await self._open(draw, self.parts.prompts.at(draw), self._to_restore[draw])
        while True:
            await self._until_room()
            try:
                prompt = self.parts.prompts.at(self._next_draw)
            except EndOfData:
                self._prompts_over = True
                self._news.set()
                return
            draw, self._next_draw = self._next_draw, self._next_draw + 1
            await self._open(draw, prompt, f"{self.config.group_prefix}{draw:06d}")

    async def _until_room(self) -> None:
        await self.parts.watch.until_fit(self.clock)
        while self.admission.capacity <= 0:
            self._room.clear()
            await self._room.wait()

    async def _open(self, draw: int, prompt: Prompt, group_id: str) -> None:
        """Open the group of a draw with what is kept of it, and send the rest of its siblings to play."""
        kept = self._kept.pop(draw, Kept(group_id=group_id))
        group = Group(
            group_id=kept.group_id,
            draw=draw,
            prompt=prompt,
            size=self.config.group_size,
            min_valid_siblings=self.config.min_valid_siblings,
        )
        self._to_restore.pop(draw, None)
        self.admission.open(group.group_id, version=min((r.oldest_version for r in kept.rollouts), default=None))
        self._groups[group.group_id] = group
        self.waits.opened(group.group_id, self.admission.in_flight[group.group_id])
        if self.parts.too_long(prompt):
            log.warning("prompt %s is longer than the model's window: skipped", prompt.prompt_id)
            self._fail(group, "prompt_too_long")
            return
        self._set_deadline(group)
        await self.expiring.put(group)
        await self._hear(group, kept)
        for sibling in group.missing_rollouts():
            await self.playing.put((group, sibling))

    async def _hear(self, group: Group, kept: Kept) -> None:
        """Open the judging of a group: with verdicts that are kept, and what is to do on the rollouts without one."""
        hearing = self._hearings[group.group_id] = self.parts.judge.open(group.prompt, group.group_id, group.size)
        to_judge = [*hearing.begin()]
        reports = kept.reports if self._still_holds(kept.reports, group.size) else {}
        for rollout in kept.rollouts:
            self._add_rollout(group, rollout)
            to_judge += hearing.add(rollout)
            report = reports.get(rollout.sibling)
            if kept.renamed:
                self.parts.journal.rollout(group.draw, group.prompt, rollout)
            if kept.renamed and report is not None:
                self.parts.journal.judged(rollout, report)
            if report is not None and group.add_verdict(rollout.sibling, report.verdict) and group.state != "open":
                self._ended(group)
                return
        for sitting in to_judge:
            await self.judging.put((group, hearing, sitting))

    def _still_holds(self, reports: Mapping[int, JudgeReport], size: int) -> bool:
        """A group is judged by one version of the judge: by the present one, or wholly by one before."""
        verdicts = [report.verdict for report in reports.values()]
        versions = {verdict.grm_version for verdict in verdicts if isinstance(verdict, Verdict)}
        by_one_before = len(reports) == size and len(versions) == 1 and max(versions) < self.judge_version
        return versions <= {self.judge_version} or by_one_before

    # -- play, judge, expire -----------------------------------------------------------------------------------------

    async def _play(self, item: tuple[Group, int]) -> None:
        group, sibling = item
        if group.state != "open":
            return
        seed = derive_seed(self.config.seed, f"{group.group_id}/{sibling}")
        seat = Seat(group_id=group.group_id, sibling=sibling, seed=seed)
        try:
            rollout = await self.parts.play(seat, group.prompt, lambda: self._started(group))
        except EngineRefused as error:  # EngineDied means that no engine is left: that ends the run
            log.warning("rollout %s/%d: %s", group.group_id, sibling, error)
            self._fail(group, "rollout_refused")
            return
        if self._add_rollout(group, rollout):
            self.tally.rollout(rollout)
            self.parts.journal.rollout(group.draw, group.prompt, rollout)
            hearing = self._hearings[group.group_id]
            for sitting in hearing.add(rollout):
                await self.judging.put((group, hearing, sitting))

    def _add_rollout(self, group: Group, rollout: Rollout) -> bool:
        added = group.add_rollout(rollout)
        if added and group.is_rolled_out:
            self.waits.rolled_out(group.group_id)
        return added

    async def _judge(self, item: tuple[Group, Hearing, Sitting]) -> None:
        group, hearing, sitting = item
        await self.parts.watch.until_fit(self.clock)
        await self.judging_hold.passed()
        if self._hearings.get(group.group_id) is not hearing:  # the group ended, or is heard anew
            return
        if sitting.members and not group.lacks_verdicts(sitting.members):
            return
        self._begun.add(group.group_id)
        self._num_sitting += 1
        try:
            reports = await hearing.judge(sitting, self._rank(group))
        finally:
            self._num_sitting -= 1
        for sibling, report in reports.items():
            self._add_report(group, sibling, stamped(report, self.judge_version))

    def _add_report(self, group: Group, sibling: int, report: JudgeReport) -> None:
        if not group.add_verdict(sibling, report.verdict):
            return
        self.tally.report(report)
        self.parts.journal.judged(group.rollout_of(sibling), report)
        if group.state != "open":
            self._ended(group)
        self.parts.watch.verdict(report)

    async def change_judge(self, version: int, change: Callable[[], Awaitable[SyncReport]]) -> SyncReport:
        """Bring the judge to another version. No group is judged by two: what is being judged is broken off, the
        verdicts of groups that still lack some are void, and these groups are heard anew."""
        with self.judging_hold.held():
            aborted = self._num_sitting
            for group_id in self._begun:
                self.judging.cancel(group_id)
            report = await change()
            self.judge_version = version
            heard_again, self._begun = self._begun, set()
            voided = 0
            for group in [self._groups[group_id] for group_id in sorted(heard_again)]:
                voided += group.void_verdicts()
                await self._hear(group, Kept(group_id=group.group_id, rollouts=tuple(group.rollouts)))
            self.tally.judge_changed(aborted=aborted, voided=voided)
        return report

    def _rank(self, group: Group) -> int:
        """Of its verdicts: groups of the batch that is due first go first, of these the one that lacks the fewest,
        of these the oldest. Of two degrees of urgency the greater overtakes as many groups as a batch has."""
        urgency = self.admission.batches_ahead(group.group_id) * group.size + len(group.missing_verdicts())
        return rank(arrival=group.draw, urgency=urgency, patience=self.config.groups_per_batch)

    def _started(self, group: Group) -> None:
        """A first token came: the group's clock starts with the first of its siblings."""
        if group.state == "open" and group.group_id not in self._running:
            self._running.add(group.group_id)
            self._set_deadline(group)

    def _set_deadline(self, group: Group) -> None:
        self._deadlines[group.group_id] = self.clock.now() + self.config.group_deadline_s

    async def _expire(self, group: Group) -> None:
        """End a group at its deadline. One that never starts has as long to start as it has to end."""
        if group.state != "open":
            return
        reached = -1.0
        while (deadline := self._deadlines[group.group_id]) != reached:  # it moves when the group starts
            await self.clock.sleep_until(deadline)
            reached = deadline
        log.warning("group %s reached its deadline: %s", group.group_id, describe(group))
        group.expire()
        self._ended(group)

    def _fail(self, group: Group, cause: str) -> None:
        if group.state == "open":  # siblings may fail at the same moment, with their engine
            group.fail(cause)
            self._ended(group)

    def _ended(self, group: Group) -> None:
        """A group left `open`: end all work on it, hand it to the learner or drop it."""
        for stage in (self.playing, self.judging, self.expiring):
            stage.cancel(group.group_id)
        self._deadlines.pop(group.group_id, None)
        self._running.discard(group.group_id)
        self._hearings.pop(group.group_id, None)
        self._begun.discard(group.group_id)
        if group.state == "failed":
            self._drop(group.group_id, group.cause)
        elif self._num_resampled < self.config.max_no_signal_groups and without_signal(group.judged()):
            self._num_resampled += 1
            self._drop(group.group_id, "no_signal")
        else:
            self._ready[group.group_id] = group.judged()
            self.admission.ready(group.group_id)
            self._unweighed.append(group.group_id)
            self.waits.judged(group.group_id)
        self._news.set()

    def _drop(self, group_id: str, cause: str) -> None:
        """Given up, and replaced by another prompt."""
        group = self._groups.pop(group_id)
        self.waits.gone(group_id)
        self.admission.drop(group_id, cause)
        self.parts.journal.group_ended(group_id, group.draw, group.prompt.prompt_id, "dropped", cause=cause)
        self._room.set()

    # -- train -------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        loop = self._loop
        while self.version < self.config.num_steps:
            began, played_s = loop.time(), self.playing.meter.busy_s
            while (places := self.config.groups_per_batch - len(self._batch)) > 0:
                with self.waits.wanting(places, self.version):
                    group = await self._next_group()
                self.waits.gone(group.group_id)
                self._batch.append(group)
                await self._take(group)
            filled = loop.time()
            with self.waits.learning(self._makes_room):
                metrics = await self.parts.trainer.step()
            learned = loop.time()
            with self.waits.pushing():
                sync = await self._push()
            batch = self._release_batch()
            ended = loop.time()
            self.parts.events.span("learner", f"step {self.version}", filled, learned)
            self.parts.events.span("weight sync", f"version {self.version}", learned, ended, bytes=sync.num_bytes)
            waits = self.waits.close_step(ended - began)
            self.tally.waited(waits)
            await self._after_step(
                StepReport(
                    step=self.version,
                    groups=batch,
                    learner=metrics,
                    sync=sync,
                    waits=waits,
                    learner_busy_s=learned - began - waits.for_groups_s,
                    policy_idle_s=max(0.0, ended - began - (self.playing.meter.busy_s - played_s)),
                )
            )

    @property
    def _makes_room(self) -> bool:
        """Whether the end of the open batch will let new groups in: not in the last steps."""
        return self.version + self.config.max_staleness + 1 < self.config.num_steps and not self._prompts_over

    async def _take(self, group: JudgedGroup) -> None:
        began = self._loop.time()
        with self.waits.learning(self._makes_room):
            await self.parts.trainer.take(group)
        if (ended := self._loop.time()) - began > SHOWN_FROM_S:
            self.parts.events.span("learner", "accumulate", began, ended, last_group=group.group_id)

    async def _next_group(self) -> JudgedGroup:
        """The oldest group that may enter the open batch. Stale ones are dropped on the way."""
        while True:
            if self._interrupted:
                raise Interrupted
            if (group := self._pick()) is not None:
                return group
            if self._prompts_over and not any(group.state == "open" for group in self._groups.values()):
                raise EndOfData("no prompts left, and none in flight")
            self._news.clear()
            try:
                async with asyncio.timeout(self.config.report_wait_s):
                    await self._news.wait()
            except TimeoutError:
                self._report_wait()

    def _pick(self) -> JudgedGroup | None:
        unweighed, self._unweighed = self._unweighed, []
        for group_id in unweighed:
            if self.admission.is_stale(self._ready[group_id].version):
                del self._ready[group_id]
                self._drop(group_id, "stale")
        urgent = self.admission.take()
        return None if urgent is None else self._ready.pop(urgent)

    async def _push(self) -> SyncReport:
        with self.clock.paused():
            return await self.parts.push_weights(self.version + 1)

    def _release_batch(self) -> tuple[JudgedGroup, ...]:
        """The batch was stepped: count it, and make room."""
        batch, self._batch = tuple(self._batch), []
        self._num_resampled = 0
        oldest = max(self.version - group.version for group in batch)
        self.max_staleness_trained = max(self.max_staleness_trained, oldest)
        self.admission.stepped([group.group_id for group in batch])
        self._unweighed = list(self._ready)
        for judged in batch:
            group = self._groups.pop(judged.group_id)
            self.parts.journal.group_ended(
                group.group_id,
                group.draw,
                group.prompt.prompt_id,
                "trained",
                step=self.version,
                version=judged.version,
            )
        self.admission.check()
        assert set(self._groups) == set(self.admission.in_flight)
        assert self.max_staleness_trained <= self.config.max_staleness
        self._room.set()
        return batch

    async def _give_up_rest(self) -> None:
        """The prompts are over and what is left fills no batch."""
        await self.parts.trainer.discard()
        log.warning("no more prompts: %d groups of an incomplete batch are dropped", len(self._groups))
        for group_id in list(self._groups):
            self._drop(group_id, "end_of_prompts")
        self._batch, self._ready, self._unweighed = [], {}, []
        self.admission.check()

    def _report_wait(self) -> None:
        waiting = [f"{group.group_id} ({describe(group)})" for group in self._groups.values() if group.state == "open"]
        log.warning("the learner waits for groups; pending: %s", "; ".join(waiting[:8]) or "none")


def stamped(report: JudgeReport, judge_version: int) -> JudgeReport:
    """A verdict knows which version of the judge gave it."""
    if judge_version == 0 or not isinstance(report.verdict, Verdict):
        return report
    return dataclasses.replace(report, verdict=dataclasses.replace(report.verdict, grm_version=judge_version))


def describe(group: Group) -> str:
    """What a group still lacks, for a log."""
    rollouts, verdicts = list_ids(group.missing_rollouts()), list_ids(group.missing_verdicts())
    return f"rollouts missing: {rollouts}; verdicts missing: {verdicts}"


def list_ids(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids)) or "none"
