"""Constructs the environment of an episode, of the class that the configuration names."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

from grmpipe.config.env import EnvConfig
from grmpipe.config.keys.dotted_path import find_at
from grmpipe.envs.env import Env

MakeEnv = Callable[[], Env]
NOTHING: Mapping[str, object] = MappingProxyType({})


def env_factory(config: EnvConfig, shared: Mapping[str, object] = NOTHING) -> MakeEnv:
    """A function that constructs a new environment for each episode. Raises ValueError if the class can't be imported,
    takes other arguments, or is no Env.

    shared: further arguments, which the environments of a run share.
    """
    found = find_at(config.path, "target")
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
    return functools.partial(make, **config.arguments, **shared)
