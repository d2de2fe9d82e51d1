"""Constructs the environment of an episode, of the class that the configuration names. Plays nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

from grmpipe.config.dotted_path import found_at
from grmpipe.config.env import EnvConfig
from grmpipe.envs.env import Env

MakeEnv = Callable[[], Env]


def env_factory(config: EnvConfig) -> MakeEnv:
    """A function that constructs a new environment for each episode. Raises ValueError if the class can't be imported,
    takes other arguments, or is no Env.
    """
    found = found_at(config.path, "target")
    if not inspect.isclass(found) or not issubclass(found, Env):
        raise ValueError(
            f"target: {config.path} is no env: it needs `async def open(self, episode)`, "
            "`async def step(self, action)` and `async def close(self)`, as in grmpipe/envs/env.py"
        )
    make = cast(Callable[..., Env], found)
    try:
        inspect.signature(make).bind(**config.arguments)
    except TypeError as error:
        raise ValueError(f"options: {config.path} can't be made with {config.arguments}: {error}") from error
    if not config.is_custom:
        make(**config.arguments)  # ours check what they are given
    return lambda: make(**config.arguments)
