"""How many groups may be in flight, and which must be trained now. Pure: counts and versions, no waiting, no clock.

The pace is AReaL's (arXiv 2505.24298, section 5.1): (max_staleness + version + 1) * groups_per_batch groups may have
been submitted in all, dropped ones aside. The bound itself is held on taking: see `most_urgent`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence


class Admission:
    """The ledger of groups by id. `version` is the number of completed optimizer steps."""

    def __init__(
        self,
        *,
        groups_per_batch: int,
        max_staleness: int,
        last_version: int,
        version: int = 0,
        dropped: Mapping[str, int] | None = None,
    ) -> None:
        """On recovery `dropped` counts, by cause, what was dropped before; groups in flight are opened again."""
        self.last_version = last_version
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.version = version
        self.trained = version * groups_per_batch
        self.dropped = Counter(dropped or {})
        self.submitted = self.trained + self.dropped.total()
        self.in_flight: dict[str, int] = {}  # group_id -> policy version when it was opened
        self._opened_at: Counter[int] = Counter()  # version -> how many of those in flight were opened at it

    @property
    def capacity(self) -> int:
        """Groups that may be opened now: none that no step up to the last would train."""
        versions = min(self.max_staleness + self.version + 1, self.last_version)
        allowed = versions * self.groups_per_batch
        return allowed - (self.trained + len(self.in_flight))

    def open(self, group_id: str, version: int | None = None) -> None:
        """`version` is the lowest of the tokens that a group comes with; one without any starts at ours."""
        assert group_id not in self.in_flight, f"group {group_id} opened twice"
        self.in_flight[group_id] = self.version if version is None else version
        self._opened_at[self.in_flight[group_id]] += 1
        self.submitted += 1

    def drop(self, group_id: str, cause: str) -> None:
        self._leave(group_id)
        self.dropped[cause] += 1

    def stepped(self, group_ids: Collection[str]) -> None:
        """A batch of these groups became the next version."""
        for group_id in group_ids:
            self._leave(group_id)
        self.trained += len(group_ids)
        self.version += 1

    def is_stale(self, version: int) -> bool:
        """Whether tokens of `version` are too old for the batch that is open now."""
        return self.version - version > self.max_staleness

    def most_urgent(self, ready: Sequence[str], taken: Collection[str]) -> str | None:
        """The ready group that is due first, first come first, if the open batch may take it; else it may take none."""
        candidate = min(ready, key=self._due, default=None)
        return candidate if candidate is not None and self.may_take(candidate, taken) else None

    def may_take(self, group_id: str, taken: Collection[str]) -> bool:
        """Whether the open batch, which has `taken`, may take this group without making another one stale.

        A group is due at the last version whose batch it is not too old for. A place is given to a group only if all
        that are due before it still fit into the batches up to then (earliest due date first, with places reserved for
        those that are not ready). What `capacity` admits always fits, so nothing that ends in time grows stale.
        """
        due = self._due(group_id)
        waiting = Counter({version + self.max_staleness: count for version, count in self._opened_at.items()})
        waiting.subtract(self._due(other) for other in {group_id, *taken})
        due_so_far = sum(count for version, count in waiting.items() if version < self.version)
        for ahead in range(due - self.version):
            due_so_far += waiting[self.version + ahead]
            if due_so_far > (ahead + 1) * self.groups_per_batch - len(taken) - 1:
                return False
        return True

    def batches_ahead(self, group_id: str) -> int:
        """Batches that may still leave a group out: 0 means that it is due in the open one."""
        return self._due(group_id) - self.version

    def _leave(self, group_id: str) -> None:
        version = self.in_flight.pop(group_id)
        self._opened_at[version] -= 1
        if not self._opened_at[version]:
            del self._opened_at[version]

    def _due(self, group_id: str) -> int:
        """Judged by when it was opened, which is never too late."""
        return self.in_flight[group_id] + self.max_staleness

    def check(self) -> None:
        """Promise 2: nothing is lost."""
        ended = self.trained + self.dropped.total()
        assert self.submitted == ended + len(self.in_flight), (
            f"submitted {self.submitted} != trained {self.trained} + dropped {dict(self.dropped)} "
            f"+ in flight {len(self.in_flight)}"
        )
