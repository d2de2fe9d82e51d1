"""Groups that were trained once and may be again while they are young. Knows versions, trains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grmpipe.types import JudgedGroup


@dataclass(frozen=True, slots=True)
class _Entry:
    group: JudgedGroup
    times: int  # that it may be trained again


class ReplayBuffer:
    """At most `groups_per_batch` go into a batch, those that were trained again least first, of these the youngest."""

    def __init__(self, *, groups_per_batch: int, max_age: int, times: int = 1) -> None:
        """max_age: in versions, between a group's oldest token and the batch that it goes into.
        times: batches that a group goes into again, at most."""
        self._groups_per_batch = groups_per_batch
        self._max_age = max_age
        self._times = times
        self._kept: list[_Entry] = []

    def keep(self, groups: Sequence[JudgedGroup]) -> None:
        """These were trained."""
        if self._groups_per_batch > 0:
            self._kept += [_Entry(group, self._times) for group in groups]

    def sample(self, version: int) -> list[JudgedGroup]:
        """For a batch that starts from weights of this version. What has grown too old is forgotten."""
        young = [kept for kept in self._kept if version - kept.group.version <= self._max_age]
        young.sort(key=lambda kept: (kept.times, kept.group.version), reverse=True)
        drawn, left = young[: self._groups_per_batch], young[self._groups_per_batch :]
        self._kept = left + [replace(kept, times=kept.times - 1) for kept in drawn if kept.times > 1]
        return [kept.group for kept in drawn]
