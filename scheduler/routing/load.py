"""The load of a role's engines: the requests in flight on each, the work left in them, estimated from those that ended,
and the tokens to prefill and to sample by which a new request gets its engine.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from grmpipe.models.types import Engine, RequestContext, SamplingParams
from grmpipe.scheduler.routing.members import RoleMembers, TrackedRequest

REMEMBERED = 512  # requests; older ones say little about a policy in training
PRIOR_WEIGHT = 4.0  # the weight of the prior below, in requests
PRIOR_LENGTHS = 2.0
PRIOR_S = 0.01, 0.001  # a step, and each row, until requests have ended; of no particular model
PRIOR_STEP_SHARE = 0.5  # the fixed share of a step, until batches of several sizes were seen


@dataclass(slots=True)
class RateEstimator:
    """Estimates rates. `expected_tokens`: the mean length until requests have ended."""

    expected_tokens: float = 256.0
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _takeovers: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _sorted: list[int] = field(default_factory=list)
    _tails: list[int] = field(default_factory=list)
    _line: tuple[float, float] | None = None  # `step`'s, until the next measurement: a balancer asks often
    _step_now_s: float | None = None

    def record_end(self, num_tokens: int) -> None:
        """A request ended with `num_tokens` tokens."""
        self._lengths.append(num_tokens)
        self._sorted = []

    def record_speed(self, num_tokens: int, seconds: float, rows: float) -> None:
        """After its first token, an engine took `seconds` for `num_tokens` tokens, with `rows` rows on average."""
        if num_tokens > 1 and seconds > 0:
            self._steps.append((max(rows, 1.0), seconds / (num_tokens - 1)))
            self._line = self._step_now_s = None

    def took_over(self, seconds: float, in_hand: int) -> None:
        """An engine with `in_hand` requests took `seconds` until a migrated request continued."""
        self._takeovers.append((in_hand, seconds))

    def takeover_s(self, max_rows: int) -> float:
        """The mean time of an engine for a migrated request that didn't wait for a row; 0 until there were any."""
        seconds = [s for in_hand, s in self._takeovers if in_hand <= max_rows]
        return sum(seconds) / len(seconds) if seconds else 0.0

    @property
    def step_now_s(self) -> float:
        """The recent mean time per token."""
        if self._step_now_s is None:
            self._step_now_s = sum(step for _, step in self._steps) / len(self._steps) if self._steps else 0.0
        return self._step_now_s

    def mean(self, running_tokens: float) -> float:
        """The mean length of a request, given the tokens of those in flight: the first to end are the short ones, so
        the estimate is all tokens per end (maximum likelihood of a censored exponential).
        """
        if not self._lengths:
            return max(self.expected_tokens, running_tokens)
        return (sum(self._lengths) + running_tokens) / len(self._lengths)

    def estimate_remaining(self, num_sampled: float, mean: float) -> float:
        """The expected remaining tokens of a request: the mean rest of longer ones, with a prior of two requests of
        length `mean` for a request longer than all.
        """
        if not self._sorted:
            self._sorted = sorted(self._lengths)
            self._tails = [*accumulate(reversed(self._sorted))][::-1]
        longer = bisect_right(self._sorted, num_sampled)
        count = len(self._sorted) - longer
        beyond = self._tails[longer] - count * num_sampled if count else 0.0
        return max((beyond + PRIOR_LENGTHS * mean) / (count + PRIOR_LENGTHS), 1.0)

    def step(self) -> tuple[float, float]:
        """(fixed seconds of a decoding step, seconds per row): a line through the measurements. Batches of one size
        give only one point of it; the prior gives the rest.
        """
        if not self._steps:
            return PRIOR_S
        if self._line is None:
            self._line = self._fitted()
        return self._line

    def _fitted(self) -> tuple[float, float]:
        count = len(self._steps)
        rows = sum(row for row, _ in self._steps) / count
        seconds = sum(step for _, step in self._steps) / count
        slope = (1 - PRIOR_STEP_SHARE) * seconds / rows
        spread = PRIOR_WEIGHT * rows * rows
        both = spread * slope + sum((row - rows) * (step - seconds) for row, step in self._steps)
        row_s = both / (spread + sum((row - rows) ** 2 for row, _ in self._steps))
        row_s = min(max(row_s, 0.0), seconds / rows)
        return seconds - row_s * rows, row_s


NEVER_S = 1e9  # finish time of a role without a slot


@dataclass(slots=True, eq=False, kw_only=True)
class InFlightRequest:
    """One request on one engine.

    tracked: its answer there, if it may be taken off. None for a scored prompt, which begins unnoticed, and for a turn
             of a trajectory, whose keys and values are there.
    moving:  it was ended there to continue elsewhere.
    """

    request_id: str
    priority: int
    num_prompt_tokens: int
    num_before: int  # tokens sampled on other engines
    movable: bool
    taken_s: float
    begun_s: float | None = None  # when its first token came here
    rows_s_at_begin: float = 0.0
    moving: bool = False
    tracked: TrackedRequest | None = None


@dataclass(slots=True)
class _Hand:
    """The load of one engine. `rows_s`: the integral of its decoding rows over time."""

    requests: dict[int, InFlightRequest]
    num_rows: int = 0
    rows_s: float = 0.0
    changed_s: float = 0.0
    last_begun_s: float = -math.inf


class RoleLoad:
    """The requests of all engines of a role, by the event loop's clock."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.rates = RateEstimator()
        self.num_waiting = 0  # requests that wait for an engine that serves
        self._hands: defaultdict[str, _Hand] = defaultdict(lambda: _Hand(requests={}))
        self._queues: dict[str, None] = {}  # engines with a queue, the one that has had it longest first
        self._idle_since_s: dict[str, float] = {}  # engines without requests
        self._idle_from_s: float | None = None  # when the role was last seen with work

    def __getitem__(self, name: str) -> int:
        """Requests in flight on an engine."""
        return len(self._hands[name].requests)

    @property
    def num_requests(self) -> int:
        return self.num_waiting + sum(len(hand.requests) for hand in self._hands.values())

    def requests(self, name: str) -> list[InFlightRequest]:
        return list(self._hands[name].requests.values())

    def num_queued(self, name: str) -> int:
        """An engine's requests that have not begun, if any has: an engine that reports no first tokens has no queue."""
        hand = self._hands[name]
        return len(hand.requests) - hand.num_rows if hand.num_rows else 0

    @property
    def with_queue(self) -> Collection[str]:
        """The engines that have such requests."""
        return self._queues.keys()

    def first_queued(self, name: str) -> InFlightRequest | None:
        """The most urgent of them, without those that are already moved."""
        waiting = (ask for ask in self._hands[name].requests.values() if ask.begun_s is None and not ask.moving)
        return min((ask for ask in waiting if ask.tracked is not None), key=lambda ask: ask.priority, default=None)

    def take(
        self, name: str, context: RequestContext, movable: bool, num_prompt_tokens: int, num_before: int
    ) -> InFlightRequest:
        """A request was sent to an engine."""
        ask = InFlightRequest(
            request_id=context.request_id,
            priority=context.priority,
            num_prompt_tokens=num_prompt_tokens,
            movable=movable,
            num_before=num_before,
            taken_s=asyncio.get_running_loop().time(),
        )
        self._hands[name].requests[id(ask)] = ask
        self._note_queue(name)
        return ask

    def began(self, name: str, ask: InFlightRequest) -> None:
        """The request's first token came."""
        if ask.begun_s is not None or id(ask) not in self._hands[name].requests:
            return
        hand = self._settled(name)
        hand.num_rows += 1
        self._note_queue(name)
        if ask.num_before:  # prefills run one after another: it began when the one before it ended
            self.rates.took_over(hand.changed_s - max(ask.taken_s, hand.last_begun_s), len(hand.requests))
        hand.last_begun_s = hand.changed_s
        ask.begun_s, ask.rows_s_at_begin = hand.changed_s, hand.rows_s

    def record_end(self, name: str, ask: InFlightRequest, num_tokens: int | None) -> None:
        """The request left the engine. num_tokens: sampled there; None if it failed."""
        hand = self._settled(name)
        del hand.requests[id(ask)]
        if not hand.requests:
            self._idle_since_s[name] = hand.changed_s
        hand.num_rows -= ask.begun_s is not None
        self._note_queue(name)
        if ask.begun_s is None:
            return
        seconds = hand.changed_s - ask.begun_s
        if num_tokens is not None and seconds > 0:
            self.rates.record_speed(num_tokens, seconds, (hand.rows_s - ask.rows_s_at_begin) / seconds)

    def idle_s(self, name: str) -> float:
        """Seconds for which an engine has had no request."""
        now_s = asyncio.get_running_loop().time()
        return 0.0 if self._hands[name].requests else now_s - self._idle_since_s.setdefault(name, now_s)

    def woke(self, name: str) -> None:
        """An engine starts to serve: its idle time restarts."""
        self._idle_since_s[name] = asyncio.get_running_loop().time()

    def backlog(self, max_rows: int) -> RoleBacklog:
        """The remaining work, estimated from recent requests. max_rows: most that one engine runs."""
        now_s, rates = asyncio.get_running_loop().time(), self.rates
        token_s = rates.step_now_s
        sampled = [0.0] * self.num_waiting
        for hand in self._hands.values():
            for ask in hand.requests.values():
                here = (now_s - ask.begun_s) / token_s if ask.begun_s is not None and token_s else 0.0
                sampled.append(ask.num_before + here)
        mean = rates.mean(sum(sampled))
        left = [rates.estimate_remaining(tokens, mean) for tokens in sampled]
        self._idle_from_s = now_s if left else self._idle_from_s or now_s
        step_s, row_s = rates.step()
        return RoleBacklog(
            role=self.role,
            requests=len(left),
            tokens=sum(left),
            longest=max(left, default=0.0),
            step_s=step_s,
            row_s=row_s,
            max_rows=max_rows,
            idle_s=now_s - self._idle_from_s,
            takeover_s=rates.takeover_s(max_rows),
        )

    def _note_queue(self, name: str) -> None:
        if self.num_queued(name):
            self._queues.setdefault(name)
        else:
            self._queues.pop(name, None)

    def _settled(self, name: str) -> _Hand:
        hand, now_s = self._hands[name], asyncio.get_running_loop().time()
        hand.rows_s += hand.num_rows * (now_s - hand.changed_s)
        hand.changed_s = now_s
        return hand


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleBacklog:
    """The remaining work of a role. `idle_s`: seconds for which it has had none."""

    role: str
    requests: int  # in flight, and waiting for an engine that serves
    tokens: float  # expected tokens still to sample, all requests together
    longest: float  # a single one's
    step_s: float
    row_s: float
    max_rows: float = math.inf  # on one slot
    idle_s: float = 0.0
    takeover_s: float = 0.0  # a slot's time for a migrated request, which must be prefilled again

    def finish_s(self, num_slots: int) -> float:
        """Seconds until all of it is done, if nothing comes and nothing moves."""
        if self.requests == 0:
            return 0.0
        if num_slots == 0:
            return NEVER_S
        busy = min(num_slots, self.requests)
        steps = max(self.longest, self.tokens / (busy * self.max_rows))
        return self.step_s * steps + self.row_s * self.tokens / busy


SIBLINGS_AHEAD = 16  # answers behind which a request waits, at most, to share a cached prefix with its siblings
ANSWERS_AHEAD = 2  # by which an engine with a queue must exceed one with a free row, to lose a request to it
GROUPS_REMEMBERED = 4096
TRAJECTORIES_REMEMBERED = 1 << 14
LOADS_KEPT = 4  # per engine, with those of before, until they are thrown away
WEIGHT_OF_LATEST = 1 / 64  # in the running mean of lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryHome:
    """The engine that has the keys and values of a trajectory's last turn.

    stay: how often the engine had begun to serve by then: what it had cached before may be lost.
    """

    name: str
    stay: int
    num_tokens: int  # in the last turn's prompt and answer


class LoadEstimate:
    """Places requests on the engine with the least load, those of a group or a trajectory together. Lengths are learned
    from answers. Among equally loaded engines it chooses the one that has served longest.
    """

    def __init__(self, members: RoleMembers) -> None:
        self._members = members
        self._in_hand: defaultdict[str, float] = defaultdict(float)
        # The serving engines, with the loads that they have and had: (tokens, place in the order of serving, name).
        self._loads: list[tuple[float, int, str]] = []
        self._places: dict[str, int] = {}
        self._serving: Mapping[str, Engine] | None = None  # of which these are
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
        """Returns an engine, and the tokens to take off again (`add`) when the request has left: those of its answer,
        and of its prompt unless that is cached there. The engine is that of its trajectory's last turn, or else of its
        siblings; the least loaded one if that has far more load.
        """
        # At once, not when a row is free. Waiting for one gained 1 % where a chain of stages bounds a step, and lost 2
        # to 3 % where judges do: a free row stays empty until the next request arrives (benchmarks/scheduling.md).
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
        if (place := self._places.get(name)) is not None:
            heapq.heappush(self._loads, (self._in_hand[name], place, name))
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
        serving = self._members.serving
        if serving is not self._serving or len(self._loads) > LOADS_KEPT * len(serving):
            self._serving, self._places = serving, {name: place for place, name in enumerate(serving)}
            self._loads = [(self._in_hand[name], place, name) for name, place in self._places.items()]
            heapq.heapify(self._loads)
        while self._loads[0][0] != self._in_hand[self._loads[0][2]]:  # a load that it had
            heapq.heappop(self._loads)
        return self._loads[0][2]

    def _remember(self, group_id: str, name: str, prompt: int) -> None:
        self._home[group_id] = name, prompt
        self._home.move_to_end(group_id)
        if len(self._home) > GROUPS_REMEMBERED:
            self._home.popitem(last=False)
