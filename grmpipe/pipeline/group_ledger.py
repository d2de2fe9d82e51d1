"""What became of a run's groups, in counts and in the journal, and what a resume needs to know about them."""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

from grmpipe.pipeline.group import Group, GroupState
from grmpipe.pipeline.interfaces import FlowConfig, GroupJournal, PipelineState, RecoveredGroup
from grmpipe.scheduler.admission import Ledger
from grmpipe.types import GroupEnd

NUM_ENDS_REMEMBERED = 256  # ended groups whose end is still known


class GroupLedger:
    """The history of the groups, from any number of processes. It holds none that is in flight.

    version:           completed optimizer steps.
    next_prompt_index: the index of the first prompt whose group was never opened.
    recovered:         prompt index -> work from before a resume, for groups that still wait to be reopened.
    ends:              the latest ends of groups.
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
