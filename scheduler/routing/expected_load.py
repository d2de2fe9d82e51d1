"""The expected load of each engine of a role, in tokens to prefill and to sample."""

import math
from collections import OrderedDict, defaultdict
from dataclasses import dataclass

from grmpipe.models.types import SamplingParams
from grmpipe.scheduler.routing.members import RoleMembers

SIBLINGS_AHEAD = 16  # answers that a request waits behind to share a cached prefix with its siblings
ANSWERS_AHEAD = 2  # by which an engine with a queue must exceed one with a free row, to lose a request to it
GROUPS_REMEMBERED = 4096
TRAJECTORIES_REMEMBERED = 1 << 14
WEIGHT_OF_LATEST = 1 / 64  # in the running mean of lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryHome:
    """The engine that has the keys and values of a trajectory's last turn.

    stay: how often the engine had begun to serve: what it had before, it may have lost.
    """

    name: str
    stay: int
    num_tokens: int  # of the last turn's prompt and answer


class LoadEstimate:
    """Places requests on the engine with the least load, those of a group or a trajectory together. Lengths are learned
    from answers. Of equally loaded engines the one that has served longest is chosen.
    """

    def __init__(self, members: RoleMembers) -> None:
        self._members = members
        self._in_hand: defaultdict[str, float] = defaultdict(float)
        self._home: OrderedDict[str, tuple[str, int]] = OrderedDict()  # group_id -> engine, hash of its last prompt
        self._trajectories: OrderedDict[str, TrajectoryHome] = OrderedDict()  # the longest without a turn first
        self._mean_new: float | None = None

    def __getitem__(self, name: str) -> float:
        """Tokens of an engine's requests in flight."""
        return self._in_hand[name]

    def place(
        self,
        group_id: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        trajectory_id: str = "",
    ) -> tuple[str, float]:
        """The engine of its trajectory's last turn, or else of its siblings, unless that has far more load than the
        least loaded one; and the tokens to take off again (`add`) when the request has left: those of its answer, and
        of its prompt unless it is cached there.
        """
        name, new = self._least(), self.new_tokens(params)
        home, cached = self._home_of(group_id, trajectory_id, prompt_ids)
        if home in self._members.serving and self._in_hand[home] - self._in_hand[name] <= SIBLINGS_AHEAD * new + cached:
            name = home
        if trajectory_id not in self._trajectories:
            self._remember(group_id, name, hash(prompt_ids))
        return name, self.add(name, new + len(prompt_ids) - (cached if name == home else 0))

    def keeps(self, name: str, trajectory_id: str, num_tokens: int) -> None:
        """An engine ended a turn of a trajectory: from now on it has these tokens of prompt and answer cached."""
        home = TrajectoryHome(name=name, stay=self._members[name].num_stays, num_tokens=num_tokens)
        self._trajectories[trajectory_id] = home
        self._trajectories.move_to_end(trajectory_id)
        if len(self._trajectories) > TRAJECTORIES_REMEMBERED:
            self._trajectories.popitem(last=False)

    def forget_trajectory(self, trajectory_id: str) -> str:
        """Forget a trajectory. Returns the engine that has its last turn, or an empty name."""
        home = self._trajectories.pop(trajectory_id, None)
        return "" if home is None else home.name

    def place_anywhere(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> tuple[str, float]:
        """An engine for a request that comes from another engine: siblings don't matter."""
        name = self._least()
        return name, self.add(name, self.new_tokens(params) + len(prompt_ids))

    def is_worth_moving(self, num_prompt_tokens: int, name: str, other: str) -> bool:
        """Whether an engine has so much more to do than another that a prompt may be computed there again."""
        ahead = self._in_hand[name] - self._in_hand[other]
        return ahead > ANSWERS_AHEAD * (self._mean_new or math.inf) + num_prompt_tokens

    def new_tokens(self, params: SamplingParams) -> float:
        """The expected number of tokens of an answer."""
        limit = float(params.max_new_tokens)
        return limit if self._mean_new is None else min(self._mean_new, limit)

    def add(self, name: str, tokens: float) -> float:
        """Add tokens to an engine's load, or take them off. Returns them."""
        self._in_hand[name] += tokens
        return tokens

    def record_end(self, num_new: int) -> None:
        """A request ended with `num_new` tokens."""
        mean = float(num_new) if self._mean_new is None else self._mean_new
        self._mean_new = mean + WEIGHT_OF_LATEST * (num_new - mean)

    def _home_of(self, group_id: str, trajectory_id: str, prompt_ids: tuple[int, ...]) -> tuple[str, int]:
        """The engine that has some of a prompt cached, and how many tokens of it."""
        home = self._trajectories.get(trajectory_id)
        if home is not None and home.stay == self._members[home.name].num_stays:
            return home.name, min(home.num_tokens, len(prompt_ids))
        name, last_prompt = self._home.get(group_id, ("", 0))
        return name, len(prompt_ids) if hash(prompt_ids) == last_prompt else 0

    def _least(self) -> str:
        return min(self._members.serving, key=self._in_hand.__getitem__)

    def _remember(self, group_id: str, name: str, prompt: int) -> None:
        self._home[group_id] = name, prompt
        self._home.move_to_end(group_id)
        if len(self._home) > GROUPS_REMEMBERED:
            self._home.popitem(last=False)
