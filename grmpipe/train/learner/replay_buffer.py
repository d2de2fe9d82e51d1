"""Groups that were trained once and may be trained again while they are young."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grmpipe.scheduler.admission import is_stale
from grmpipe.types import JudgedGroup


@dataclass(frozen=True, slots=True)
class _Entry:
    group: JudgedGroup
    times: int  # how often it may still be trained


class ReplayBuffer:
    """Replays at most `groups_per_batch` groups per batch: those replayed least first, of these the youngest."""

    def __init__(self, *, groups_per_batch: int, max_age: int, times: int = 1) -> None:
        """max_age: versions between a group's oldest token and the batch that replays it.
        times: how often a group is replayed, at most.
        """
        self._groups_per_batch = groups_per_batch
        self._max_age = max_age
        self._times = times
        self._kept: list[_Entry] = []

    def keep(self, groups: Sequence[JudgedGroup]) -> None:
        """Keep groups that were just trained."""
        if self._groups_per_batch > 0:
            self._kept += [_Entry(group, self._times) for group in groups]

    def sample(self, version: int) -> list[JudgedGroup]:
        """Groups to replay in a batch that starts from this version. Drops those that are too old."""
        young = [kept for kept in self._kept if not is_stale(kept.group.version, version, self._max_age)]
        young.sort(key=lambda kept: (kept.times, kept.group.version), reverse=True)
        drawn, left = young[: self._groups_per_batch], young[self._groups_per_batch :]
        self._kept = left + [replace(kept, times=kept.times - 1) for kept in drawn if kept.times > 1]
        return [kept.group for kept in drawn]
