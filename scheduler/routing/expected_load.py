"""What each engine of a role is expected to have in hand, in tokens to prefill and to sample. It sends nothing."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable

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
        self._serving: dict[str, None] = {}  # in order of arrival: of those with equally little the first is asked
        self._home: OrderedDict[str, tuple[str, int]] = OrderedDict()  # group_id -> engine, hash of its last prompt
        self._mean_new: float | None = None
        for name in names:
            self.came(name)

    def __getitem__(self, name: str) -> float:
        """Tokens of an engine's requests in flight."""
        return self._in_hand[name]

    def came(self, name: str) -> None:
        """An engine serves from now on."""
        self._serving.setdefault(name)

    def went(self, name: str) -> None:
        """No request goes to this one any more; those that it has may end."""
        self._serving.pop(name, None)

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
        return min(self._serving if among is None else among, key=self._in_hand.__getitem__)

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
        return tokens

    def _remember(self, group_id: str, name: str, prompt: int) -> None:
        self._home[group_id] = name, prompt
        self._home.move_to_end(group_id)
        if len(self._home) > GROUPS_REMEMBERED:
            self._home.popitem(last=False)
