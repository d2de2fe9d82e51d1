"""Constructs the environment of a rollout, of the class that the configuration names. Plays nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

from grmpipe.config.dotted_path import found_at
from grmpipe.config.env import EnvConfig
from grmpipe.types import Env, Prompt


def env_factory(config: EnvConfig) -> Callable[[Prompt], Env]:
    """A function that constructs a new environment for each rollout. Raises ValueError if the class can't be imported,
    takes other arguments, or is no Env.
    """
    found = found_at(config.path, "target")
    if not inspect.isclass(found) or not issubclass(found, Env):
        raise ValueError(
            f"target: {config.path} is no env: it needs `start(self)` that gives the first messages, and "
            "`async def step(self, text)` that gives the replies, none at the end"
        )
    make = cast(Callable[..., Env], found)
    try:
        inspect.signature(make).bind("prompt", **config.options)
    except TypeError as error:
        raise ValueError(f"options: {config.path} can't be made with a prompt and {config.options}: {error}") from error
    return lambda prompt: make(prompt, **config.options)
