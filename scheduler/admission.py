"""How many groups may be in flight, and which must be trained now. Pure: counts and versions, no waiting, no clock.

The pace is AReaL's (arXiv 2505.24298, section 5.1): (max_staleness + version + 1) * groups_per_batch groups may have
been submitted in all, dropped ones aside. The bound itself is held on taking: see `take`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Mapping


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
        self._waiting: Counter[int] = Counter()  # version -> how many, opened at it, aren't in the open batch
        self._ready: dict[str, int] = {}  # group_id -> how manieth
        self._by_due: list[tuple[int, int, str]] = []  # of those that are ready; what was dropped is skipped
        self._arrivals = itertools.count()
        self._taken: set[str] = set()  # into the open batch

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
        self._waiting[self.in_flight[group_id]] += 1
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

    def ready(self, group_id: str) -> None:
        """It has its verdicts: a batch may take it from now on."""
        self._ready[group_id] = next(self._arrivals)
        heapq.heappush(self._by_due, (self._due(group_id), self._ready[group_id], group_id))

    def take(self) -> str | None:
        """The ready group that is due first, first come first, if the open batch may take it; else it may take none."""
        while self._by_due:
            _, arrival, group_id = self._by_due[0]
            if self._ready.get(group_id) != arrival:
                heapq.heappop(self._by_due)
                continue
            if not self.may_take(group_id):
                return None
            heapq.heappop(self._by_due)
            del self._ready[group_id]
            self._taken.add(group_id)
            self._stop_waiting(group_id)
            return group_id
        return None

    def may_take(self, group_id: str) -> bool:
        """Whether the open batch may take this group without making another one stale.

        A group is due at the last version whose batch it is not too old for. A place is given to a group only if all
        that are due before it still fit into the batches up to then (earliest due date first, with places reserved for
        those that are not ready). What `capacity` admits always fits, so nothing that ends in time grows stale.
        """
        due = self._due(group_id)
        places = self.groups_per_batch - len(self._taken) - 1
        before = sum(count for version, count in self._waiting.items() if version + self.max_staleness < self.version)
        for version in range(self.version, due):
            before += self._waiting[version - self.max_staleness]
            if before > places:
                return False
            places += self.groups_per_batch
        return True

    def batches_ahead(self, group_id: str) -> int:
        """Batches that may still leave a group out: 0 means that it is due in the open one."""
        return self._due(group_id) - self.version

    def _leave(self, group_id: str) -> None:
        self._ready.pop(group_id, None)
        if group_id in self._taken:
            self._taken.remove(group_id)
        else:
            self._stop_waiting(group_id)
        del self.in_flight[group_id]

    def _stop_waiting(self, group_id: str) -> None:
        version = self.in_flight[group_id]
        self._waiting[version] -= 1
        if not self._waiting[version]:
            del self._waiting[version]

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
