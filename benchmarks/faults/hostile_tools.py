"""Tools that turn against the run at random, in processes of their own: for chaos.py."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

from grmpipe.envs.env import Action, Episode, Observation, Opening
from grmpipe.envs.tools.tool_env import ToolEnv

STAGES = ("open", "step", "close")
KINDS = ("hang", "block", "exit", "raise", "wrong type", "100 MB", "memory", "daemon", "close descriptors")


class HostileTools(ToolEnv):
    """share: of the episodes that it spoils, in one stage each."""

    def __init__(self, functions: str, share: float) -> None:
        super().__init__(functions)
        self._share = share
        self._stage = self._kind = ""

    async def open(self, episode: Episode) -> Opening:
        draw = random.Random(f"hostile {episode.seed}")
        if draw.random() < self._share:
            self._stage, self._kind = draw.choice(STAGES), draw.choice(KINDS)
        return await self._spoilt("open", await super().open(episode))

    async def step(self, action: Action) -> Observation:
        return await self._spoilt("step", await super().step(action))

    async def close(self) -> None:
        await self._spoilt("close", await super().close())

    async def _spoilt(self, stage: str, answer: Any) -> Any:
        if stage != self._stage:
            return answer
        self._stage = ""
        return spoil(self._kind, answer)


def spoil(kind: str, answer: Any) -> Any:
    if kind == "hang":
        threading.Event().wait()
    elif kind == "block":
        while True:
            pass
    elif kind == "exit":
        os._exit(3)
    elif kind == "raise":
        raise KeyError("a tool's own error")
    elif kind == "wrong type":
        return {"an": "answer"}
    elif kind == "100 MB":
        return Observation(messages=["x" * 100_000_000], done=False)
    elif kind == "memory":
        taken = [bytearray(1 << 26) for _ in range(64)]
        return taken and answer
    elif kind == "daemon":
        if os.fork() == 0:
            os.setsid()
            time.sleep(3600)
    else:
        os.closerange(3, 64)
    return answer
