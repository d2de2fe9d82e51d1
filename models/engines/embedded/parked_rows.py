"""Parked rows: finished requests whose keys and values stay in their slots for later turns.

A row is parked for its trajectory. The trajectory's next turn begins with the parked tokens and takes the slot over. A
request that shares only a part, such as a sibling or a branch, gets a copy of that part.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

MIN_SHARED_TOKENS = 16  # below it a copy isn't worth its trouble


@dataclass(slots=True, eq=False, kw_only=True)
class ParkedRow:
    """The cached tokens of a finished request, and their slot. The last sampled token was never fed: it isn't there."""

    trajectory_id: str
    group_id: str
    token_ids: tuple[int, ...]
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """The first tokens of a prompt, which a parked row has. `taken`: the prompt has all of its tokens."""

    row: ParkedRow
    num_tokens: int
    taken: bool


class ParkedRows:
    """Parked rows, the oldest first."""

    def __init__(self) -> None:
        self._rows: list[ParkedRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ParkedRow]:
        return iter(self._rows)

    def park(self, row: ParkedRow) -> None:
        self._rows.append(row)

    def drop(self, row: ParkedRow) -> None:
        self._rows.remove(row)

    def drop_oldest(self) -> None:
        del self._rows[0]

    def drop_trajectory(self, trajectory_id: str) -> None:
        self._rows = [row for row in self._rows if row.trajectory_id != trajectory_id]

    def clear(self) -> None:
        self._rows.clear()

    def prefix_for(self, trajectory_id: str, group_id: str, token_ids: tuple[int, ...]) -> CachedPrefix | None:
        """The longest cached beginning of these tokens: of the trajectory itself, else of its group. None without a
        trajectory.
        """
        if not trajectory_id:
            return None
        own = [row for row in self._rows if row.trajectory_id == trajectory_id]
        return _longest(own, token_ids, trajectory_id) or _longest(
            [row for row in self._rows if row.group_id == group_id], token_ids, trajectory_id
        )


def _longest(rows: list[ParkedRow], token_ids: tuple[int, ...], trajectory_id: str) -> CachedPrefix | None:
    best: CachedPrefix | None = None
    for row in rows:
        shared = num_shared(row.token_ids, token_ids)
        taken = row.trajectory_id == trajectory_id and shared == len(row.token_ids)
        if (taken or shared >= MIN_SHARED_TOKENS) and (best is None or shared > best.num_tokens):
            best = CachedPrefix(row=row, num_tokens=shared, taken=taken)
    return best


def num_shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The number of first tokens in which two sequences agree. Slices are compared, which is faster than tokens."""
    longest = min(len(a), len(b))
    if a[:longest] == b[:longest]:
        return longest
    return bisect_left(range(longest), x=True, key=lambda index: a[: index + 1] != b[: index + 1])
