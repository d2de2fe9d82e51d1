"""From prompts to judged groups: admits, plays, judges, and ends groups at their deadline. Trains none."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping

from grmpipe.data.stream import EndOfData
from grmpipe.envs.play import RolloutAborted, Seat
from grmpipe.judge.verdict import only_finite
from grmpipe.pipeline.counters import Tally
from grmpipe.pipeline.group import Group
from grmpipe.pipeline.group_buffer import Flight, describe
from grmpipe.pipeline.interfaces import KILLED_ENGINES, Cut, FlowConfig, Kept, Parts
from grmpipe.pipeline.rollout_gate import PolicyFitness
from grmpipe.types import Hearing, JudgeReport, Prompt, Rollout, Sitting, Verdict
from models.seeds import derive_seed
from models.types import EngineRefused
from scheduler.clock import ActiveClock, Hold
from scheduler.routing.router import RequestKillsEngines
from scheduler.stream import Stage
from scheduler.weights.weight_sync import SyncReport

log = logging.getLogger(__name__)

UNBOUNDED = 1 << 30


class Producer:
    """Opens groups while there is room, and brings each to its end: complete, partial or failed."""

    def __init__(
        self,
        parts: Parts,
        config: FlowConfig,
        flight: Flight,
        clock: ActiveClock,
        tally: Tally,
        cut: Cut,
        kept: Mapping[int, Kept],
    ) -> None:
        """`clock`: of the deadlines. `kept` holds, by draw, the work that a resume found."""
        self.judge_version = cut.judge_version
        self.next_draw = cut.next_draw
        self.to_restore = dict(sorted(cut.in_flight.items()))  # draw -> group_id
        self.judging_hold = Hold(clock)  # while it is held no sitting begins
        engines = flight.waits.engines
        self.playing: Stage[tuple[Group, int]] = Stage(
            "play",
            self._play,
            lambda item: item[0].group_id,
            width=config.play_width,
            bound=config.play_width,
            shared_meter=engines,
        )
        self.judging: Stage[tuple[Group, Hearing, Sitting]] = Stage(
            "judge",
            self._judge,
            lambda item: item[0].group_id,
            width=config.judge_width,
            bound=0,  # all: who waits is ranked, and admission bounds them
            rank=lambda item: self._rank(item[0]),
            shared_meter=engines,
        )
        self.expiring: Stage[Group] = Stage(
            "expire", self._expire, lambda group: group.group_id, width=UNBOUNDED, bound=0
        )
        self._fitness = PolicyFitness.of(config)
        self._parts = parts
        self._config = config
        self._flight = flight
        self._clock = clock
        self._tally = tally
        self._kept = dict(kept)
        self._hearings: dict[str, Hearing] = {}  # of open groups
        self._begun: set[str] = set()  # of these, where the judge has begun
        self._num_sitting = 0  # sittings under way
        self._deadlines: dict[str, float] = {}
        self._running: set[str] = set()  # groups whose first token came

    # -- admit ---------------------------------------------------------------------------------------------------------

    async def admit(self) -> None:
        """Returns when the prompts are over."""
        for draw, group_id in list(self.to_restore.items()):
            await self._open(draw, self._parts.prompts.at(draw), group_id)
        while True:
            await self._parts.watch.until_fit(self._clock)
            await self._flight.until_room()
            await self._fitness.until_fit(self._clock)
            try:
                prompt = self._parts.prompts.at(self.next_draw)
            except EndOfData:
                self._flight.no_more_prompts()
                return
            draw, self.next_draw = self.next_draw, self.next_draw + 1
            await self._open(draw, prompt, f"{self._config.group_prefix}{draw:06d}")

    async def _open(self, draw: int, prompt: Prompt, group_id: str) -> None:
        """Open the group of a draw with what is kept of it, and send the rest of its siblings to play."""
        kept = self._kept.pop(draw, Kept(group_id=group_id))
        group = Group(
            group_id=kept.group_id,
            draw=draw,
            prompt=prompt,
            size=self._config.group_size,
            min_valid_siblings=self._config.min_valid_siblings,
        )
        self.to_restore.pop(draw, None)
        self._flight.open(group, version=min((r.oldest_version for r in kept.rollouts), default=None))
        if self._parts.too_long(prompt):
            log.warning("prompt %s is longer than the model's context window: skipped", prompt.prompt_id)
            self._fail(group, "prompt_too_long")
            return
        if kept.killed_engines:
            self._fail(group, KILLED_ENGINES, "before the resume")
            return
        self._set_deadline(group)
        await self.expiring.put(group)
        await self._hear(group, kept)
        for sibling in group.missing_rollouts():
            await self.playing.put((group, sibling))

    async def _hear(self, group: Group, kept: Kept) -> None:
        """Open the judging of a group: with verdicts that are kept, and what is to do on the rollouts without one."""
        hearing = self._hearings[group.group_id] = self._parts.judge.open(group.prompt, group.group_id, group.size)
        to_judge = [*hearing.begin()]
        reports = kept.reports if self._still_holds(kept.reports, group.size) else {}
        for rollout in kept.rollouts:
            self._add_rollout(group, rollout)
            to_judge += hearing.add(rollout)
            report = reports.get(rollout.sibling)
            if kept.renamed:
                self._parts.journal.rollout(group.draw, group.prompt, rollout)
            if kept.renamed and report is not None:
                self._parts.journal.judged(rollout, report)
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

    # -- play ----------------------------------------------------------------------------------------------------------

    async def _play(self, item: tuple[Group, int]) -> None:
        group, sibling = item
        if group.state != "open":
            return
        seed = derive_seed(self._config.seed, f"{group.group_id}/{sibling}")
        seat = Seat(group_id=group.group_id, sibling=sibling, seed=seed)
        try:
            rollout = await self._parts.play(seat, group.prompt, lambda: self._started(group))
        except (EngineRefused, RolloutAborted) as error:  # EngineDied means that no engine is left: that ends the run
            log.warning("rollout %s/%d: %s", group.group_id, sibling, error)
            self._fail(group, cause_of(error), str(error))
            return
        if self._add_rollout(group, rollout):
            self._tally.rollout(rollout)
            self._parts.journal.rollout(group.draw, group.prompt, rollout)
            hearing = self._hearings[group.group_id]
            for sitting in hearing.add(rollout):
                await self.judging.put((group, hearing, sitting))

    def _add_rollout(self, group: Group, rollout: Rollout) -> bool:
        added = group.add_rollout(rollout)
        if added and group.is_rolled_out:
            self._flight.waits.rolled_out(group.group_id)
        return added

    # -- judge ---------------------------------------------------------------------------------------------------------

    async def _judge(self, item: tuple[Group, Hearing, Sitting]) -> None:
        group, hearing, sitting = item
        await self._parts.watch.until_fit(self._clock)
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
            self._add_report(group, sibling, stamped(only_finite(report), self.judge_version))

    def _add_report(self, group: Group, sibling: int, report: JudgeReport) -> None:
        if not group.add_verdict(sibling, report.verdict):
            return
        self._tally.report(report)
        self._parts.journal.judged(group.rollout_of(sibling), report)
        if group.state != "open":
            self._ended(group)
        self._parts.watch.verdict(report)

    def _rank(self, group: Group) -> int:
        """Of its verdicts: groups of the batch that is due first go first, of these the one that lacks the fewest,
        of these the oldest. Of two degrees of urgency the greater overtakes as many groups as a batch has."""
        batches_ahead = self._flight.admission.batches_ahead(group.group_id)
        urgency = batches_ahead * group.size + len(group.missing_verdicts())
        return rank(arrival=group.draw, urgency=urgency, patience=self._config.groups_per_batch)

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
            for group in [self._flight.groups[group_id] for group_id in sorted(heard_again)]:
                voided += group.void_verdicts()
                await self._hear(group, Kept(group_id=group.group_id, rollouts=tuple(group.rollouts)))
            self._tally.judge_changed(aborted=aborted, voided=voided)
        return report

    # -- end -----------------------------------------------------------------------------------------------------------

    def _started(self, group: Group) -> None:
        """A first token came: the group's clock starts with the first of its siblings."""
        if group.state == "open" and group.group_id not in self._running:
            self._running.add(group.group_id)
            self._set_deadline(group)

    def _set_deadline(self, group: Group) -> None:
        self._deadlines[group.group_id] = self._clock.now() + self._config.group_deadline_s

    async def _expire(self, group: Group) -> None:
        """End a group at its deadline. One that never starts has as long to start as it has to end."""
        if group.state != "open":
            return
        reached = -1.0
        while (deadline := self._deadlines[group.group_id]) != reached:  # it moves when the group starts
            await self._clock.sleep_until(deadline)
            reached = deadline
        log.warning("group %s reached its deadline: %s", group.group_id, describe(group))
        late = group.expire()
        self._ended(group)
        for timeout in late:
            self._parts.watch.verdict(JudgeReport(verdict=timeout))

    def _fail(self, group: Group, cause: str, detail: str = "") -> None:
        if group.state == "open":  # siblings may fail at the same moment, with their engine
            group.fail(cause, detail)
            self._ended(group)

    def _ended(self, group: Group) -> None:
        """A group left `open`: end all work on it."""
        for stage in (self.playing, self.judging, self.expiring):
            stage.cancel(group.group_id)
        self._deadlines.pop(group.group_id, None)
        self._running.discard(group.group_id)
        self._hearings.pop(group.group_id, None)
        self._begun.discard(group.group_id)
        self._flight.ended(group)
        self._fitness.group_ended(group)


def cause_of(error: EngineRefused | RolloutAborted) -> str:
    """Of a group that is dropped for it."""
    if isinstance(error, RequestKillsEngines):
        return KILLED_ENGINES
    return "rollout_refused" if isinstance(error, EngineRefused) else "rollout_died"


def stamped(report: JudgeReport, judge_version: int) -> JudgeReport:
    """A verdict knows which version of the judge gave it."""
    if judge_version == 0 or not isinstance(report.verdict, Verdict):
        return report
    return dataclasses.replace(report, verdict=dataclasses.replace(report.verdict, grm_version=judge_version))


def rank(*, arrival: int, urgency: int, patience: int) -> int:
    """The lowest rank is served first. Urgency 0 is the greatest; arrivals are numbered, alike ones are one party.

    Whoever is less urgent by n degrees is overtaken by none but the next n * patience arrivals: after these he is
    first, however many more come.
    """
    return arrival + patience * urgency
