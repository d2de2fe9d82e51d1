"""Admission: how many groups may be in flight, and which must be trained now. Pure: a rule over counts and versions.

The pace is AReaL's (arXiv 2505.24298, section 5.1): (max_staleness + version + 1) * groups_per_batch groups may have
been submitted in all, not counting dropped ones. `may_take` enforces the bound on staleness.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The rule of admission. `version`: the number of completed optimizer steps; no step goes past `last_version`.

    opened_at: the version at which a group was opened. It stands for the group's age, because no token is older.
    """

    groups_per_batch: int
    max_staleness: int
    last_version: int

    def capacity(self, version: int, num_in_flight: int) -> int:
        """Groups that may be opened now: only groups that a step up to the last one can train."""
        versions = min(self.max_staleness + version + 1, self.last_version)
        return (versions - version) * self.groups_per_batch - num_in_flight

    def is_stale(self, token_version: int, version: int) -> bool:
        """Whether tokens are too old for the batch that is open at `version`."""
        return version - token_version > self.max_staleness

    def batches_ahead(self, opened_at: int, version: int) -> int:
        """The number of batches that may still leave a group out: 0 means that it is due in the open one."""
        return opened_at + self.max_staleness - version

    def may_take(self, opened_at: int, *, version: int, num_taken: int, waiting: Mapping[int, int]) -> bool:
        """Whether the open batch may take such a group without making another group stale.

        num_taken: groups of the open batch. waiting: opened_at -> number of groups not in it, including this one.

        A group is due at the last version whose batch it is not too old for. It gets a place only if all groups due
        before it still fit into the batches up to then (earliest due date first, with places reserved for groups that
        are not ready). What `capacity` admits always fits, so no group that ends in time becomes stale.
        """
        places = self.groups_per_batch - num_taken - 1
        before = sum(count for other, count in waiting.items() if self.batches_ahead(other, version) < 0)
        for due in range(version, version + self.batches_ahead(opened_at, version)):
            before += waiting.get(due - self.max_staleness, 0)
            if before > places:
                return False
            places += self.groups_per_batch
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The number of groups submitted, and what became of them. Raises AssertionError if one was lost."""

    submitted: int
    trained: int
    dropped: Counter[str]  # by cause
    in_flight: int

    def __post_init__(self) -> None:
        assert self.submitted == self.trained + self.dropped.total() + self.in_flight, (
            f"submitted {self.submitted} != trained {self.trained} + dropped {dict(self.dropped)} "
            f"+ in flight {self.in_flight}"
        )
