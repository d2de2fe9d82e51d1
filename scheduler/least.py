"""Who has the least of something that changes, as `min` over all would choose, without looking at all. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator


class Least:
    """Names and their amounts. Of those that have equally little the one that came first is chosen.

    The heap has one entry that counts for each name, which is its amount or less: amounts that grow are corrected once
    their entry comes to the top, those that shrink get a new one. So each change costs the logarithm of the names.
    """

    def __init__(self) -> None:
        self._amounts: dict[str, float] = {}
        self._places: dict[str, int] = {}  # in order of arrival
        self._lower: dict[str, float] = {}  # of the entry that counts
        self._entries: list[tuple[float, int, str]] = []
        self._arrivals = itertools.count()

    def __contains__(self, name: object) -> bool:
        return name in self._amounts

    def __iter__(self) -> Iterator[str]:
        """In order of arrival."""
        return iter(self._amounts)

    def add(self, name: str, amount: float) -> None:
        """One more to choose from, behind those that have as little; nothing changes for one that is there."""
        if name not in self._amounts:
            self._places[name] = next(self._arrivals)
            self._amounts[name] = amount
            self._enter(name)

    def discard(self, name: str) -> None:
        for table in (self._amounts, self._places, self._lower):
            table.pop(name, None)

    def set(self, name: str, amount: float) -> None:
        """Of a name that is there; nothing happens for any other."""
        if name in self._amounts:
            self._amounts[name] = amount
            if amount < self._lower[name]:
                self._enter(name)

    def first(self) -> str:
        """Raises IndexError where there is none."""
        while True:
            lower, place, name = self._entries[0]
            if self._places.get(name) != place or self._lower[name] != lower:
                heapq.heappop(self._entries)
            elif self._amounts[name] > lower:
                self._lower[name] = self._amounts[name]
                heapq.heapreplace(self._entries, (self._amounts[name], place, name))
            else:
                return name

    def _enter(self, name: str) -> None:
        self._lower[name] = self._amounts[name]
        heapq.heappush(self._entries, (self._amounts[name], self._places[name], name))
        if len(self._entries) > 2 * len(self._amounts) + 16:
            self._entries = [(lower, self._places[name], name) for name, lower in self._lower.items()]
            heapq.heapify(self._entries)
