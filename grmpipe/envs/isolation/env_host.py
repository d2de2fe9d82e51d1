"""Opens the place where a run's environments live: the run itself, a process each, or a container each.

async with open_env_host(config.env, run_dir=..., limits=...) as host:
    env = host.env()  # for each episode; an Env like any other
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import INPROCESS
from grmpipe.envs.env import Env
from grmpipe.envs.env_factory import env_factory
from grmpipe.envs.isolation.inprocess_host import InprocessHost
from grmpipe.envs.isolation.leftovers import clear, noted, sweep
from grmpipe.envs.isolation.process_host import ProcessHost
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
    await asyncio.to_thread(sweep, run_dir)
    if config.isolation.kind == INPROCESS:
        yield InprocessHost(env_factory(config), limits, faults)
        return
    left = noted(run_dir)
    host = ProcessHost(config, left, limits, faults)
    try:
        await host.start()
        yield host
    finally:
        await host.stop()
        await asyncio.to_thread(clear, run_dir, left)
