"""The one owner of all groups in flight: their states, rollouts and verdicts, and the open batch."""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from grmpipe.pipeline.group import OPEN, Group, GroupState
from grmpipe.pipeline.interfaces import FlowConfig, GroupJournal, PipelineState, RecoveredGroup
from grmpipe.pipeline.stall_times import GroupSupply
from grmpipe.pipeline.step_metrics import has_zero_advantages
from grmpipe.scheduler.admission import Admission, AdmissionPace, Ledger
from grmpipe.types import Failed, GroupEnd, JudgedGroup, JudgeReport, Prompt, Rollout

NUM_ENDS_REMEMBERED = 256  # ended groups whose end is still known


class GroupLedger:
    """The history of the groups, from any number of processes. It holds none that is in flight.

    version:           completed optimizer steps.
    next_prompt_index: the index of the first prompt whose group was never opened.
    recovered:         prompt index -> work from before a resume, of groups that aren't open again yet.
    ends:              the latest.
    max_staleness_trained: the largest staleness of a trained group, in steps.
    """

    def __init__(
        self,
        config: FlowConfig,
        journal: GroupJournal,
        before: PipelineState | None,
        kept: Mapping[int, RecoveredGroup] | None,
    ) -> None:
        before = before or PipelineState()
        self.version = before.version
        self.next_prompt_index = before.next_prompt_index
        self.max_staleness_trained = before.max_staleness_trained
        self.recovered = {index: RecoveredGroup(group_id=name) for index, name in before.in_flight.items()}
        self.recovered |= dict(kept or {})
        self.ends: deque[GroupEnd] = deque(maxlen=NUM_ENDS_REMEMBERED)
        self.num_resampled = before.num_resampled  # zero-advantage groups dropped since the last step
        self._config = config
        self._journal = journal
        self._trained = before.version * config.groups_per_batch
        self._dropped = Counter(before.dropped)
        self._submitted = self._trained + self._dropped.total()

    @property
    def prompts_to_reopen(self) -> list[int]:
        """Indices of the prompts whose groups were in flight when the run stopped."""
        return sorted(prompt_index for prompt_index in self.recovered if prompt_index < self.next_prompt_index)

    def open_group(self, prompt_index: int) -> RecoveredGroup:
        """Count the group of a prompt as submitted. Returns its work from before a resume, if any."""
        self.next_prompt_index = max(self.next_prompt_index, prompt_index + 1)
        self._submitted += 1
        kept = self.recovered.pop(prompt_index, None)
        return kept or RecoveredGroup(group_id=f"{self._config.group_prefix}{prompt_index:06d}")

    def skip(self, prompt_index: int) -> None:
        """Leave a place in the order of the prompts empty."""
        self.next_prompt_index = max(self.next_prompt_index, prompt_index + 1)
        self.recovered.pop(prompt_index, None)

    def end_step(self, batch: Sequence[Group]) -> None:
        """Count a batch that was trained and pushed: the version rises by one."""
        self.max_staleness_trained = max(self.max_staleness_trained, *(self.version - group.version for group in batch))
        self.version += 1
        self._trained += len(batch)
        self.num_resampled = 0

    def end_group(self, group: Group) -> None:
        if group.state is GroupState.DROPPED:
            self._dropped[group.cause] += 1
        end = group.end(self.version)
        self._journal.group_ended(end)
        self.ends.append(end)

    def num_dropped(self, cause: str) -> int:
        """Groups dropped for a cause."""
        return self._dropped[cause]

    def counts(self, in_flight: int) -> Ledger:
        """The number of groups submitted, and what became of them. Raises AssertionError if one was lost."""
        return Ledger(
            submitted=self._submitted, trained=self._trained, dropped=Counter(self._dropped), in_flight=in_flight
        )

    def state(self, in_flight: Collection[Group], judge_version: int) -> PipelineState:
        """The state between two steps. Groups of the open batch count as in flight: they weren't stepped."""
        reopening = {prompt_index: self.recovered[prompt_index].group_id for prompt_index in self.prompts_to_reopen}
        return PipelineState(
            version=self.version,
            next_prompt_index=self.next_prompt_index,
            in_flight=reopening | {group.prompt_index: group.group_id for group in in_flight},
            dropped=dict(self._dropped),
            max_staleness_trained=self.max_staleness_trained,
            judge_version=judge_version,
            num_resampled=self.num_resampled,
        )


UNTAKEN = (GroupState.ROLLING_OUT, GroupState.JUDGING, GroupState.READY)


class UntakenGroups:
    """Groups by state, then by `opened_at`, each in the order in which it entered the state. The buffer updates it.

    The time of a query grows with the number of versions in flight, not with the number of groups, except for
    `first_of_prompts`, which only a deterministic run uses.
    """

    def __init__(self) -> None:
        self._groups: dict[GroupState, dict[int, dict[str, Group]]] = {state: {} for state in UNTAKEN}

    def __len__(self) -> int:
        return sum(map(self.count, UNTAKEN))

    def add(self, group: Group) -> None:
        self._groups[group.state].setdefault(group.opened_at, {})[group.group_id] = group

    def remove(self, group: Group, state: GroupState) -> None:
        """Remove a group from a state that it has left."""
        alike = self._groups[state][group.opened_at]
        del alike[group.group_id]
        if not alike:
            del self._groups[state][group.opened_at]

    def count(self, *states: GroupState) -> int:
        return sum(len(alike) for state in states for alike in self._groups[state].values())

    def by_opening(self) -> Counter[int]:
        """opened_at -> number of groups."""
        counts: Counter[int] = Counter()
        for versions in self._groups.values():
            counts.update({opened_at: len(alike) for opened_at, alike in versions.items()})
        return counts

    def oldest(self, state: GroupState) -> int | None:
        """The lowest version at which a group in this state was opened; None without one."""
        return min(self._groups[state], default=None)

    def first_ready(self) -> Group | None:
        """The group opened at the lowest version; among these, the one that became ready first."""
        ready = self._groups[GroupState.READY]
        return next(iter(ready[min(ready)].values())) if ready else None

    def first_of_prompts(self) -> Group | None:
        """The group of the lowest prompt index, if it is ready. Groups of later prompts wait for it."""
        groups = (group for state in UNTAKEN for alike in self._groups[state].values() for group in alike.values())
        first = min(groups, key=lambda group: group.prompt_index, default=None)
        return first if first is not None and first.state is GroupState.READY else None

    def list_rolled_out(self) -> Iterator[Group]:
        """Groups with all their rollouts, those with all verdicts before the others."""
        for state in (GroupState.READY, GroupState.JUDGING):
            for alike in self._groups[state].values():
                yield from alike.values()

    def list_ready(self, opened: Callable[[int], bool]) -> list[Group]:
        """Ready groups that were opened at such versions, the lowest first."""
        ready = self._groups[GroupState.READY]
        return [group for opened_at in sorted(ready) if opened(opened_at) for group in ready[opened_at].values()]


class GroupBuffer:
    """The groups in flight. Generation fills it, training empties it; both wait here, for room and for news.

             open           add_rollout        add_report, expire          take           stepped
        prompt --> ROLLING_OUT -------> JUDGING ----------------> READY ---------> TAKEN --------> TRAINED
                       |                   |                        |                |
                       +-------------------+------------------------+----------------+--> DROPPED, with its cause

    `Group` has the transitions. A group is in flight until it is TRAINED or DROPPED: then it leaves the buffer, the
    journal records it, and there is room for another prompt. READY and TAKEN groups still count as in flight.

    Example, with groups_per_batch=2 and max_staleness=0:
        a, b are opened          capacity 0: generation waits in `until_room`
        b, then a become READY   training takes b, then a: the batch is full
        `end_step`               both are TRAINED, the version is 1, capacity is 2
    """

    def __init__(
        self,
        config: FlowConfig,
        journal: GroupJournal,
        *,
        on_change: Callable[[GroupSupply], None] = lambda supply: None,
        pipeline_state: PipelineState | None = None,
        kept: Mapping[int, RecoveredGroup] | None = None,
    ) -> None:
        """on_change: called with the supply of groups whenever it changes. kept: prompt index -> finished work from
        before a resume.
        """
        self.ledger = GroupLedger(config, journal, pipeline_state, kept)
        self.groups: dict[str, Group] = {}  # group_id -> group, in order of opening
        self.untaken = UntakenGroups()  # those of them that the open batch doesn't have
        self.taken: list[Group] = []  # the open batch, in the order in which its groups were taken
        self.prompts_over = False
        self.news = asyncio.Event()  # set when a group leaves OPEN, the prompts are over, or the run is to stop
        self._admission = Admission(
            groups_per_batch=config.groups_per_batch,
            max_staleness=config.max_staleness,
            last_version=config.num_steps,
        )
        self.pace = AdmissionPace(config.groups_per_batch, config.max_staleness)
        self._config = config
        self._journal = journal
        self._on_change = on_change
        self._room = asyncio.Event()

    @property
    def version(self) -> int:
        """Completed optimizer steps."""
        return self.ledger.version

    # -- for generation ------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The number of groups that may be opened now."""
        return self._admission.capacity(self.version, len(self.groups))

    async def until_room(self) -> None:
        """Return once a group may be opened: there is room, and the pace doesn't hold it."""
        now = asyncio.get_running_loop().time
        while held_s := self.pace.wait_s(now(), capacity=self.capacity, num_open=self.untaken.count(*OPEN)):
            self._room.clear()  # nothing is awaited since the look above, so no news is lost
            with suppress(TimeoutError):
                async with asyncio.timeout(None if held_s == math.inf else held_s):
                    await self._room.wait()

    def open(self, prompt_index: int, prompt: Prompt) -> tuple[Group, RecoveredGroup]:
        """Open a group for the next prompt, or reopen one. Returns it and its work from before a resume, if any.

        It counts as opened at the current version, or at the lowest version of its recovered tokens.
        """
        kept = self.ledger.open_group(prompt_index)
        assert kept.group_id not in self.groups, f"group {kept.group_id} opened twice"
        begun = [] if kept.begun_version is None else [kept.begun_version]
        group = Group(
            group_id=kept.group_id,
            prompt_index=prompt_index,
            prompt=prompt,
            size=self._config.group_size,
            min_valid_siblings=self._config.min_valid_siblings,
            limit_s=self._config.group_deadline_s,
            # By the oldest token that it already has: counted from now it would be due too late, and stale by then.
            opened_at=min([rollout.oldest_version for rollout in kept.rollouts] + begun, default=self.version),
        )
        self.groups[group.group_id] = group
        self.untaken.add(group)
        self._on_change(self._supply())
        return group, kept

    def no_more_prompts(self) -> None:
        self.prompts_over = True
        self.news.set()

    def add_rollout(self, group: Group, rollout: Rollout, *, journalled: bool = False) -> bool:
        """Add a rollout. Returns False if it is refused. journalled: whether the journal has it already."""
        with self._moving(group):
            if not group.add_rollout(rollout):
                return False
            # Only what the group accepted: a late or repeated result must not have a line, which a resume would read.
            if not journalled:
                self._journal.rollout(group.prompt_index, group.prompt, rollout)
        return True

    def add_report(self, group: Group, sibling: int, report: JudgeReport, *, journalled: bool = False) -> bool:
        """Add a verdict's report. Returns False if it is refused. journalled: whether the journal has it already."""
        with self._moving(group):
            if not group.add_verdict(sibling, report.verdict, report.rewards_by_part):
                return False
            if not journalled:
                self._journal.record_verdict(group.get_rollout(sibling), report)
        return True

    def expire(self, group: Group) -> list[Failed]:
        """End a group whose deadline has passed. Returns the verdicts that became timeouts."""
        with self._moving(group):
            return group.expire()

    def drop(self, group: Group, cause: str, detail: str = "") -> None:
        """Drop a group; another prompt takes its place."""
        with self._moving(group):
            group.drop(cause, detail)

    # -- for training --------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> tuple[JudgedGroup, ...]:
        """The open batch, in the order in which its groups were taken."""
        return tuple(group.to_judged_group() for group in self.taken)

    @property
    def places_left(self) -> int:
        """Groups that the open batch still lacks."""
        return self._config.groups_per_batch - len(self.taken)

    @property
    def batch_siblings(self) -> int:
        """Rollouts of a whole batch."""
        return self._config.groups_per_batch * self._config.group_size

    @property
    def is_over(self) -> bool:
        """Whether no group will become ready any more."""
        return self.prompts_over and not self.untaken.count(*OPEN)

    def is_done_with(self, *states: GroupState) -> bool:
        """Whether no group is in one of these states, and none may be opened under this version any more."""
        return (self.prompts_over or self.capacity <= 0) and not self.untaken.count(*states)

    def take(self) -> JudgedGroup | None:
        """Take the ready group that is due first; in a deterministic run the next one in the order of the prompts. None
        if there is none, or the open batch may not have it.

        Drops stale groups that it meets. In a deterministic run it drops zero-advantage groups too, in that order.
        """
        # Stale groups go first: they were opened earliest, so the loop below would take them.
        for ready in self.untaken.list_ready(lambda opened_at: self._admission.is_stale(opened_at, self.version)):
            if self.is_stale(ready):  # its tokens may be younger than its opening
                self.drop(ready, "stale")
        first = self.untaken.first_of_prompts if self._config.deterministic else self.untaken.first_ready
        while (group := first()) is not None and self.may_take(group):
            with self._moving(group):
                # In the order of prompts: a step may drop only so many, so in order of arrival time would decide which.
                if not (self._config.deterministic and self._resample(group)):
                    group.take()
            if group.state is GroupState.TAKEN:
                self.taken.append(group)
                return group.to_judged_group()
        return None

    def end_step(self) -> tuple[JudgedGroup, ...]:
        """Close the open batch after its step and push: the version rises by one, and there is room again.

        Returns the batch.
        """
        batch, taken = self.batch, self.taken
        assert not any(map(self.is_stale, taken))
        self.ledger.end_step(taken)
        self.taken = []
        for group in taken:
            with self._moving(group):
                group.train()
        self.counts()
        return batch

    def drop_batch(self, cause: str, detail: str) -> None:
        """Drop the groups of the open batch; others take their places."""
        taken, self.taken = self.taken, []
        for group in taken:
            self.drop(group, cause, detail)
        self.counts()

    def give_up(self) -> None:
        """Drop all groups: the prompts are over, and the remaining groups fill no batch."""
        self.taken = []
        for group in list(self.groups.values()):
            self.drop(group, "end_of_prompts")
        self.counts()

    def counts(self) -> Ledger:
        """The number of groups submitted, and what became of them. Asserts that none is lost: submitted == trained +
        dropped + in flight, and each group is in one place.
        """
        counts = self.ledger.counts(len(self.groups))
        assert counts.in_flight == len(self.untaken) + len(self.taken)
        return counts

    # -- rules ---------------------------------------------------------------------------------------------------------

    @property
    def makes_room(self) -> bool:
        """Whether the end of the open batch will admit new groups."""
        return self._admission.makes_room(self.version) and not self.prompts_over

    def is_stale(self, group: Group) -> bool:
        """Whether a group with all its rollouts is too old for the open batch."""
        return self._admission.is_stale(group.version, self.version)

    def batches_ahead(self, group: Group) -> int:
        """The number of batches that may still leave the group out: 0 means that it is due in the open one."""
        return self._admission.batches_ahead(group.opened_at, self.version)

    def may_take(self, group: Group) -> bool:
        """Whether the open batch may take the group: groups that are due before it still find a place."""
        return self._admission.may_take(
            group.opened_at,
            version=self.version,
            num_taken=len(self.taken),
            waiting=self.untaken.by_opening(),
        )

    @contextmanager
    def _moving(self, group: Group) -> Iterator[None]:
        """The one place where groups change their state: updates the index and notifies everyone concerned."""
        before = group.state
        yield
        if group.state is GroupState.READY and before in OPEN and not self._config.deterministic:
            self._resample(group)
        if group.state is before:
            return
        if before in UNTAKEN:
            self.untaken.remove(group, before)
        if group.state in UNTAKEN:
            self.untaken.add(group)
        if group.state in (GroupState.TRAINED, GroupState.DROPPED):
            del self.groups[group.group_id]
            self.ledger.end_group(group)
            self._room.set()
        if before in OPEN and group.state not in OPEN:
            self.news.set()
            self._room.set()
        self._on_change(self._supply())

    def _supply(self) -> GroupSupply:
        oldest = self.untaken.oldest(GroupState.ROLLING_OUT)
        return GroupSupply(
            lacks_due=oldest is not None and self._admission.batches_ahead(oldest, self.version) <= 0,
            num_judging=self.untaken.count(GroupState.JUDGING),
            num_ready=self.untaken.count(GroupState.READY),
        )

    def _resample(self, group: Group) -> bool:
        """Drop a zero-advantage group, up to `max_zero_advantage_groups` in a step. Returns whether it did."""
        if self.ledger.num_resampled >= self._config.max_zero_advantage_groups:
            return False
        judged, mask_truncated = group.to_judged_group(), self._config.truncated == "mask"
        if not has_zero_advantages(judged, self._config.algorithm, mask_truncated=mask_truncated):
            return False
        self.ledger.num_resampled += 1
        group.drop("zero_advantage")
        return True
