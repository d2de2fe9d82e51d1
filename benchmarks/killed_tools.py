"""Tools in a process that ends in a share of the episodes, at a random turn: for benchmarks/agents.py."""

from __future__ import annotations

import os
import random

from grmpipe.envs.env import Action, Episode, Observation, Opening
from grmpipe.envs.tools.tool_env import ToolEnv

LAST_TURN = 2  # no fault waits for a later turn than this


class KilledTools(ToolEnv):
    """share: of the episodes whose process ends; an episode that ends before its turn comes is hit in its end."""

    def __init__(self, functions: str, share: float) -> None:
        super().__init__(functions)
        self._share = share
        self._turn: int | None = None

    async def open(self, episode: Episode) -> Opening:
        draw = random.Random(f"killed {episode.seed}")
        self._turn = draw.randint(0, LAST_TURN) if draw.random() < self._share else None
        return await super().open(episode)

    async def step(self, action: Action) -> Observation:
        observation = await super().step(action)
        if self._turn is not None and (action.turn >= self._turn or observation.done):
            os._exit(1)
        return observation
