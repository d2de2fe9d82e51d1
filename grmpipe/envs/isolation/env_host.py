"""Opens the place where a run's environments live: the run itself, a process each, or a container each.

async with open_env_host(config.env, run_dir=..., limits=...) as host:
    env = host.env()  # for each episode; an Env like any other
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import CONTAINER, INPROCESS, IsolationConfig
from grmpipe.envs.env import Env
from grmpipe.envs.env_factory import env_factory
from grmpipe.envs.isolation.container_host import ContainerHost
from grmpipe.envs.isolation.inprocess_host import InprocessHost
from grmpipe.envs.isolation.leftovers import clear, noted, sweep
from grmpipe.envs.isolation.process_host import ProcessHost
from grmpipe.envs.isolation.report import answers, isolation_report
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
    isolation = config.isolation
    if isolation.kind == INPROCESS:
        yield InprocessHost(env_factory(config), limits, faults)
        return
    await asyncio.to_thread(check_isolation, isolation)
    left = noted(run_dir, isolation.runtime if isolation.kind == CONTAINER else "")
    host = (ContainerHost if isolation.kind == CONTAINER else ProcessHost)(config, left, limits, faults)
    try:
        await host.start()
        yield host
    finally:
        await host.stop()
        await asyncio.to_thread(clear, run_dir, left)


def check_isolation(config: IsolationConfig) -> None:
    """Raises ValueError if this machine lacks what a configuration can't do without."""
    if config.kind == CONTAINER:
        if not answers(config.runtime):
            raise ValueError(f"isolation.runtime: {config.runtime} does not answer here; task=doctor shows what does")
        return
    if sys.platform != "linux":
        raise ValueError(f"isolation.kind: {config.kind} needs Linux; type env.isolation.kind={INPROCESS}")
    if config.require and (lacks := isolation_report(config).weaknesses):
        parts = "; ".join(f"{each.part} ({each.reason})" for each in lacks)
        raise ValueError(f"isolation.require: this machine lacks: {parts}; set it to false to run without")
