"""Opens the place where a run's environments live: the run itself, a process each, or a container each.

async with open_env_host(config.env, run_dir=..., seed=...) as host:
    env = host.env()  # for each episode; within its limits, an Env like any other
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import CONTAINER, INPROCESS, IsolationConfig
from grmpipe.envs.env import Env
from grmpipe.envs.env_factory import env_factory
from grmpipe.envs.isolation.container_host import ContainerHost
from grmpipe.envs.isolation.fault_plan import FaultInjection
from grmpipe.envs.isolation.hosted_env import ENDING_S
from grmpipe.envs.isolation.inprocess_host import InprocessHost
from grmpipe.envs.isolation.isolation_report import answers, described, isolation_report, weaknesses
from grmpipe.envs.isolation.leftovers import clear, noted, sweep
from grmpipe.envs.isolation.process_host import ProcessHost
from grmpipe.envs.isolation.seat_counts import SeatCounts
from grmpipe.envs.limited_env import LimitedEnv, StageLimits
from scheduler.events import EventSink

NOTHING: Mapping[str, object] = MappingProxyType({})

log = logging.getLogger(__name__)


class EnvHost(Protocol):
    """Where environments live. Constructing one (`env`) is cheap and takes no place; `Env.open` does."""

    seats: SeatCounts

    def env(self) -> Env:
        """A new environment, for one episode. Its stages end in time, and its answers are checked (LimitedEnv)."""
        ...


@asynccontextmanager
async def open_env_host(
    config: EnvConfig,
    *,
    run_dir: Path,
    seed: int = 0,
    arguments: Mapping[str, object] = NOTHING,
    events: EventSink | None = None,
) -> AsyncIterator[EnvHost]:
    """The host of a run's environments, with all that `config.isolation` asks for.

    Sweeps first what an earlier process of this run left. At the end all seats are closed or killed. Processes end with
    the thread that this is called in. Raises ValueError if the environment can't be made, or a part of the isolation is
    missing and required.

    seed:      of `config.inject_faults`.
    arguments: further ones of the environment's class; only for kind=inprocess.
    events:    gets a span for each stage of each episode.
    """
    await asyncio.to_thread(sweep, run_dir)
    isolation, faults = config.isolation, FaultInjection(share=config.inject_faults, seed=seed)
    limits = StageLimits(
        boot_s=config.boot_s,
        step_s=config.step_s,
        close_s=config.close_s,
        max_observation_chars=config.max_observation_chars,
    )
    if isolation.kind == INPROCESS:
        yield InprocessHost(env_factory(config, arguments), limits, faults, events)
        return
    assert not arguments, "an environment in another process makes its own"
    await asyncio.to_thread(check_isolation, isolation)
    left = noted(run_dir, isolation.runtime if isolation.kind == CONTAINER else "")
    host = (ContainerHost if isolation.kind == CONTAINER else ProcessHost)(config, left, limits, faults)
    try:
        await host.start()
        if isinstance(host, ProcessHost) and (lacks := weaknesses(await host.missing())):
            log.warning("environments run with less isolation than they should: %s", described(lacks))
        yield LimitedHost(host, limits, events)
    finally:
        await host.stop()
        await asyncio.to_thread(clear, run_dir, left)


class LimitedHost:
    """A host whose environments are checked here too. They keep their limits themselves: these are longer."""

    def __init__(self, host: EnvHost, limits: StageLimits, events: EventSink | None) -> None:
        self.seats = host.seats
        self._host = host
        self._events = events
        self._limits = replace(
            limits,
            boot_s=limits.boot_s + 2 * ENDING_S,
            step_s=limits.step_s + 2 * ENDING_S,
            close_s=2 * limits.close_s + 2 * ENDING_S,
        )

    def env(self) -> Env:
        return LimitedEnv(self._host.env(), self._limits, self._events)


def check_isolation(config: IsolationConfig) -> None:
    """Raises ValueError if this machine lacks what a configuration can't do without."""
    if config.kind == CONTAINER:
        if not answers(config.runtime):
            raise ValueError(f"isolation.runtime: {config.runtime} does not answer here; task=doctor shows what does")
        return
    if sys.platform != "linux":
        raise ValueError(f"isolation.kind: {config.kind} needs Linux; type env.isolation.kind={INPROCESS}")
    if config.require and (lacks := weaknesses(isolation_report(config).missing)):
        raise ValueError(f"isolation.require: this machine lacks: {described(lacks)}; set it to false to run without")
