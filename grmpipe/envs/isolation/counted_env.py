"""An environment in the run's own process, counted. Limits end its coroutines at an `await`: blocking code has none."""

from __future__ import annotations

from grmpipe.envs.env import Action, Env, Episode, Observation, Opening
from grmpipe.envs.isolation.seat_counts import SeatCounts


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
