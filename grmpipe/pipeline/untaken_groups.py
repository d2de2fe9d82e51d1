"""An index of the groups that no batch has taken: which is due first, how many are in each state."""

from collections import Counter
from collections.abc import Callable, Iterator

from grmpipe.pipeline.group import Group, GroupState

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
