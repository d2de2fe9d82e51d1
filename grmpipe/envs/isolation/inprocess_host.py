"""Environments in the run's own process: counted, and failing on purpose where that is asked for. Isolates nothing."""

from __future__ import annotations

from grmpipe.envs.blame import FaultRules
from grmpipe.envs.checked_env import NO_RULES, CheckedEnv
from grmpipe.envs.env import Action, Env, EnvFault, Episode, Observation, Opening
from grmpipe.envs.env_factory import MakeEnv
from grmpipe.envs.isolation.fault_plan import OPENING, FaultInjection, FaultMoment, fault_moment
from grmpipe.envs.isolation.seat_counts import SeatCounts
from grmpipe.envs.limited_env import LimitedEnv, StageLimits
from scheduler.events import EventSink


class InprocessHost:
    """Constructs environments right here. Limits end their coroutines at an `await`: blocking code has none."""

    def __init__(
        self,
        make: MakeEnv,
        limits: StageLimits,
        faults: FaultInjection,
        events: EventSink | None = None,
        rules: FaultRules = NO_RULES,
    ) -> None:
        self.seats = SeatCounts()
        self.lacks = ""  # nothing was asked for
        self._make = make
        self._limits = limits
        self._faults = faults
        self._events = events
        self._rules = rules

    def env(self) -> Env:
        checked = CheckedEnv(self._make, self._rules)
        return LimitedEnv(CountedEnv(checked, self.seats, self._faults), self._limits, self._events)


class CountedEnv:
    """An environment that is counted, and that fails at its moment, if it has one."""

    def __init__(self, env: Env, seats: SeatCounts, faults: FaultInjection) -> None:
        self._env = env
        self._seats = seats
        self._faults = faults
        self._moment: FaultMoment | None = None
        self._is_open = False

    async def open(self, episode: Episode) -> Opening:
        self._moment = fault_moment(self._faults, episode)
        self._seats.opened += 1
        self._is_open = True
        self._fail_at(OPENING)
        return await self._env.open(episode)

    async def step(self, action: Action) -> Observation:
        self._fail_at(action.turn)
        observation = await self._env.step(action)
        self._fail_at(action.turn, is_done=observation.done)
        return observation

    async def close(self) -> None:
        is_closed = False
        try:
            await self._env.close()
            is_closed = True
        finally:
            self._seats.closed += self._is_open and is_closed
            self._seats.killed += self._is_open and not is_closed

    def _fail_at(self, turn: int, *, is_done: bool = False) -> None:
        if self._moment is not None and self._moment.has_come(turn, is_done=is_done):
            raise EnvFault("ended on purpose (env.inject_faults)", "died")
