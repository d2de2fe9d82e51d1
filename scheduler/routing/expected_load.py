"""What each engine of a role is expected to have in hand, in tokens to prefill and to sample. It sends nothing."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator

from models.types import SamplingParams

SIBLINGS_AHEAD = 16  # answers that one waits behind for the sake of a prefix that it shares with its siblings
GROUPS_REMEMBERED = 4096
WEIGHT_OF_LATEST = 1 / 64  # in the running mean of lengths


class LoadEstimate:
    """Places requests where the least is to do, those of one group together. Lengths are learned as answers come.

    names: of the engines that serve, which `came` and `went` change. Where few of them may be asked, `among` are these.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._in_hand: defaultdict[str, float] = defaultdict(float)
        self._serving = IndexedHeap()
        self._home: OrderedDict[str, tuple[str, int]] = OrderedDict()  # group_id -> engine, hash of its last prompt
        self._mean_new: float | None = None
        for name in names:
            self.came(name)

    def __getitem__(self, name: str) -> float:
        """Tokens of an engine's requests in flight."""
        return self._in_hand[name]

    def came(self, name: str) -> None:
        """An engine serves from now on."""
        self._serving.add(name, self._in_hand[name])

    def went(self, name: str) -> None:
        """No request goes to this one any more; those that it has may end."""
        self._serving.discard(name)

    def place(
        self,
        group_id: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        among: Collection[str] | None = None,
    ) -> tuple[str, float]:
        """The engine of its siblings, unless that has far more to do than the one with the least; and the tokens that
        `give_back` is to be told when the request has left: its answer, and its prompt unless that is cached there."""
        name, new = self.least(among), self.new_tokens(params)
        home, last_prompt = self._home.get(group_id, ("", 0))
        prompt = hash(prompt_ids)
        cached = len(prompt_ids) if prompt == last_prompt else 0
        here = self._serving if among is None else among
        if home in here and self._in_hand[home] - self._in_hand[name] <= SIBLINGS_AHEAD * new + cached:
            name = home
        self._remember(group_id, name, prompt)
        return name, self._take(name, new + len(prompt_ids) - (cached if name == home else 0))

    def place_anywhere(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, among: Collection[str] | None = None
    ) -> tuple[str, float]:
        """For one that comes from another engine: its siblings aren't its concern."""
        name = self.least(among)
        return name, self._take(name, self.new_tokens(params) + len(prompt_ids))

    def least(self, among: Collection[str] | None = None) -> str:
        return self._serving.first() if among is None else min(among, key=self._in_hand.__getitem__)

    def new_tokens(self, params: SamplingParams) -> float:
        """That an answer is expected to have."""
        limit = float(params.max_new_tokens)
        return limit if self._mean_new is None else min(self._mean_new, limit)

    def give_back(self, name: str, tokens: float) -> None:
        self._take(name, -tokens)

    def ended(self, num_new: int) -> None:
        """A request came to its end with so many tokens."""
        mean = float(num_new) if self._mean_new is None else self._mean_new
        self._mean_new = mean + WEIGHT_OF_LATEST * (num_new - mean)

    def _take(self, name: str, tokens: float) -> float:
        self._in_hand[name] += tokens
        self._serving.set(name, self._in_hand[name])
        return tokens

    def _remember(self, group_id: str, name: str, prompt: int) -> None:
        self._home[group_id] = name, prompt
        self._home.move_to_end(group_id)
        if len(self._home) > GROUPS_REMEMBERED:
            self._home.popitem(last=False)


class IndexedHeap:
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
