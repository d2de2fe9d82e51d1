"""An environment in the run's own process, counted. Limits end its coroutines at an `await`: blocking code has none."""

from __future__ import annotations

from grmpipe.envs.env import Action, Env, Episode, Observation, Opening
from grmpipe.envs.isolation.opened_envs import OpenedEnvs


class CountedEnv:
    """An environment that is counted."""

    def __init__(self, env: Env, counts: OpenedEnvs) -> None:
        self._env = env
        self._counts = counts
        self._is_open = False

    async def open(self, episode: Episode) -> Opening:
        self._counts.opened += 1
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
            self._counts.closed += self._is_open and is_closed
            self._counts.killed += self._is_open and not is_closed
