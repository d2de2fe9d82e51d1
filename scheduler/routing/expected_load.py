"""The expected load of each engine of a role, in tokens to prefill and to sample. Sends nothing."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable

from models.types import SamplingParams

SIBLINGS_AHEAD = 16  # answers that a request waits behind to share a cached prefix with its siblings
GROUPS_REMEMBERED = 4096
WEIGHT_OF_LATEST = 1 / 64  # in the running mean of lengths


class LoadEstimate:
    """Places requests on the engine with the least load, those of a group together. Lengths are learned from answers.

    names: engines that serve, which `came` and `went` change. `among`: the engines that may take the request, if not
           all.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._in_hand: defaultdict[str, float] = defaultdict(float)
        self._serving: dict[str, None] = {}  # in order of arrival: of equally loaded engines the first is chosen
        self._home: OrderedDict[str, tuple[str, int]] = OrderedDict()  # group_id -> engine, hash of its last prompt
        self._mean_new: float | None = None
        for name in names:
            self.came(name)

    def __getitem__(self, name: str) -> float:
        """Tokens of an engine's requests in flight."""
        return self._in_hand[name]

    def came(self, name: str) -> None:
        """An engine starts to serve."""
        self._serving.setdefault(name)

    def went(self, name: str) -> None:
        """An engine gets no more requests; those that it has may end."""
        self._serving.pop(name, None)

    def place(
        self,
        group_id: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        among: Collection[str] | None = None,
    ) -> tuple[str, float]:
        """The engine of its siblings, unless that has far more load than the least loaded one; and the tokens to
        `give_back` when the request has left: those of its answer, and of its prompt unless it is cached there.
        """
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
        """An engine for a request that comes from another engine: siblings don't matter."""
        name = self.least(among)
        return name, self._take(name, self.new_tokens(params) + len(prompt_ids))

    def least(self, among: Collection[str] | None = None) -> str:
        return min(self._serving if among is None else among, key=self._in_hand.__getitem__)

    def new_tokens(self, params: SamplingParams) -> float:
        """The expected number of tokens of an answer."""
        limit = float(params.max_new_tokens)
        return limit if self._mean_new is None else min(self._mean_new, limit)

    def give_back(self, name: str, tokens: float) -> None:
        self._take(name, -tokens)

    def ended(self, num_new: int) -> None:
        """A request ended with `num_new` tokens."""
        mean = float(num_new) if self._mean_new is None else self._mean_new
        self._mean_new = mean + WEIGHT_OF_LATEST * (num_new - mean)

    def _take(self, name: str, tokens: float) -> float:
        self._in_hand[name] += tokens
        return tokens

    def _remember(self, group_id: str, name: str, prompt: int) -> None:
        self._home[group_id] = name, prompt
        self._home.move_to_end(group_id)
        if len(self._home) > GROUPS_REMEMBERED:
            self._home.popitem(last=False)
