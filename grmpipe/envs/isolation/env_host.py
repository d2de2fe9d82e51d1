"""Opens the place where a run's environments live: the run itself, a process each, or a container each.

async with open_env_host(config.env, run_dir=..., limits=...) as host:
    env = host.env()                    # for each episode; an Env like any other
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from grmpipe.config.env import EnvConfig
from grmpipe.envs.env import Env
from grmpipe.envs.env_factory import env_factory
from grmpipe.envs.isolation.stages import FaultInjection, SeatCounts, StageLimits


class EnvHost(Protocol):
    """Where environments live. Constructing one (`env`) is cheap and takes no place; `Env.open` does."""

    seats: SeatCounts

    def env(self) -> Env:
        """A new environment, for one episode. It enforces the limits of the stages by itself."""
        ...


@asynccontextmanager
async def open_env_host(
    config: EnvConfig,
    *,
    run_dir: Path,
    limits: StageLimits,
    faults: FaultInjection | None = None,
) -> AsyncIterator[EnvHost]:
    """The host of a run's environments, with all that `config.isolation` asks for.

    Sweeps first what an earlier process of this run left. At the end all seats are closed or killed.
    Raises ValueError if the environment can't be made, or a part of the isolation is missing and required.
    """
    env_factory(config)
    raise NotImplementedError
    yield
