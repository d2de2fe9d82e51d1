"""Environments in the run's own process: counted, not isolated."""

from __future__ import annotations

from grmpipe.envs.blame import FaultRules
from grmpipe.envs.checked_env import NO_RULES, CheckedEnv
from grmpipe.envs.env import Action, Env, Episode, Observation, Opening
from grmpipe.envs.env_factory import MakeEnv
from grmpipe.envs.isolation.seat_counts import SeatCounts
from grmpipe.envs.limited_env import LimitedEnv, StageLimits
from scheduler.events import EventSink


class InprocessHost:
    """Constructs environments right here. Limits end their coroutines at an `await`: blocking code has none."""

    def __init__(
        self,
        make: MakeEnv,
        limits: StageLimits,
        events: EventSink | None = None,
        rules: FaultRules = NO_RULES,
    ) -> None:
        self.seats = SeatCounts()
        self.lacks = ""  # nothing was asked for
        self._make = make
        self._limits = limits
        self._events = events
        self._rules = rules

    def env(self) -> Env:
        checked = CheckedEnv(self._make, self._rules)
        return LimitedEnv(CountedEnv(checked, self.seats), self._limits, self._events)


class CountedEnv:
    """An environment that is counted."""

    def __init__(self, env: Env, seats: SeatCounts) -> None:
        self._env = env
        self._seats = seats
        self._is_open = False

    async def open(self, episode: Episode) -> Opening:
        self._seats.opened += 1
        self._is_open = True
        return await self._env.open(episode)

    async def step(self, action: Action) -> Observation:
        return await self._env.step(action)

    async def close(self) -> None:
        is_closed = False
        try:
            await self._env.close()
            is_closed = True
        finally:
            self._seats.closed += self._is_open and is_closed
            self._seats.killed += self._is_open and not is_closed
