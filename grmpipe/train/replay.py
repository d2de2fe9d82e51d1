"""Groups that were trained once and may be once more while they are young. Knows versions, trains nothing."""

from __future__ import annotations

from collections.abc import Sequence

from grmpipe.types import JudgedGroup


class ReplayBuffer:
    """At most `groups_per_batch` go into a batch, the youngest first, each once."""

    def __init__(self, *, groups_per_batch: int, max_age: int) -> None:
        """max_age: in versions, between a group's oldest token and the batch that it goes into."""
        self._groups_per_batch = groups_per_batch
        self._max_age = max_age
        self._kept: list[JudgedGroup] = []

    def keep(self, groups: Sequence[JudgedGroup]) -> None:
        """These were trained."""
        if self._groups_per_batch > 0:
            self._kept += groups

    def draw(self, version: int) -> list[JudgedGroup]:
        """For a batch that starts from weights of this version. What has grown too old is forgotten."""
        young = [group for group in self._kept if version - group.version <= self._max_age]
        young.sort(key=lambda group: group.version, reverse=True)
        self._kept = young[self._groups_per_batch :]
        return young[: self._groups_per_batch]
