"""Opens the place where a run's environments live: the run itself, a process each, or a container each.

async with open_env_host(config.env, run_dir=...) as host:
    env = host.env()  # for each episode; within its limits, an Env like any other
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import CONTAINER, INPROCESS, IsolationConfig
from grmpipe.envs.checked_env import CheckedEnv
from grmpipe.envs.env import Env
from grmpipe.envs.env_factory import MakeEnv, env_factory
from grmpipe.envs.fault_owner import fault_rules
from grmpipe.envs.limited_env import LimitedEnv, StageLimits
from grmpipe.envs.opened_envs import OpenedEnvs
from grmpipe.envs.sandbox.container_host import ContainerHost
from grmpipe.envs.sandbox.crash_cleanup import clear, record_host, sweep
from grmpipe.envs.sandbox.hosted_env import ENDING_S
from grmpipe.envs.sandbox.isolation_report import answers, describe_missing, isolation_report, weaknesses
from grmpipe.envs.sandbox.process_host import ProcessHost
from grmpipe.envs.tools.mcp_tools import McpServers
from grmpipe.scheduler.events import EventSink


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvHost:
    """Where environments live. Constructing one (`env`) is cheap and takes no place; `Env.open` does.

    make:   an environment without checks and limits here.
    lacks:  what the isolation lacks on this machine, in words; empty: nothing that counts.
    """

    make: MakeEnv
    counts: OpenedEnvs
    limits: StageLimits
    events: EventSink | None
    lacks: str = ""

    def env(self) -> Env:
        """A new environment, for one episode. Its stages end in time, and its answers are checked (LimitedEnv)."""
        return LimitedEnv(self.make(), self.limits, self.events)


@asynccontextmanager
async def open_env_host(
    config: EnvConfig,
    *,
    run_dir: Path,
    data: tuple[str, ...] = (),
    events: EventSink | None = None,
) -> AsyncIterator[EnvHost]:
    """The host of a run's environments, with all that `config.isolation` asks for, and the servers of their tools.

    Sweeps first what an earlier process of this run left. At the end all workers are closed or killed. Processes end
    with the thread that this is called in. Raises ValueError if the environment can't be made, or a part of the
    isolation is missing and required.

    data:   files that no environment in a process of its own reads, besides those of the run.
    events: gets a span for each stage of each episode.
    """
    await asyncio.to_thread(sweep, run_dir)
    isolation, limits = config.isolation, StageLimits.of(config)
    if isolation.kind == INPROCESS:
        async with tool_servers(config) as servers:
            make, rules, counts = env_factory(config, servers), fault_rules(config.policy_errors), OpenedEnvs()
            here = lambda: CheckedEnv(make, rules, counts)  # noqa: E731
            yield EnvHost(make=here, counts=counts, limits=limits, events=events)
        return
    assert not config.mcp, "servers of tools are processes of their own"
    await asyncio.to_thread(check_isolation, isolation)
    left = record_host(run_dir, isolation.runtime if isolation.kind == CONTAINER else "")
    if isolation.kind == CONTAINER:
        host: ContainerHost | ProcessHost = ContainerHost(config, left, limits)
    else:
        host = ProcessHost(config, left, limits, data=(str(run_dir), *data))
    try:
        await host.start()
        lacks = weaknesses(await host.find_missing())
        yield EnvHost(
            make=host.env, counts=host.counts, limits=longer(limits), events=events, lacks=describe_missing(lacks)
        )
    finally:
        await host.stop()
        await asyncio.to_thread(clear, run_dir, left)


def longer(limits: StageLimits) -> StageLimits:
    """Limits on an environment that keeps limits itself, and kills what doesn't."""
    return replace(
        limits,
        boot_s=limits.boot_s + 2 * ENDING_S,
        step_s=limits.step_s + 2 * ENDING_S,
        close_s=2 * limits.close_s + 2 * ENDING_S,
    )


@asynccontextmanager
async def tool_servers(config: EnvConfig) -> AsyncIterator[Mapping[str, object]]:
    """Further arguments of the environment's class: the servers of tools, which episodes share."""
    if not config.mcp:
        yield {}
        return
    servers = McpServers(config.mcp_servers)
    try:
        yield {"servers": servers}
    finally:
        await servers.close()


def check_isolation(config: IsolationConfig) -> None:
    """Raises ValueError if this machine lacks what a configuration can't do without."""
    if config.kind == INPROCESS:
        return
    if config.kind == CONTAINER:
        if not answers(config.runtime):
            raise ValueError(f"isolation.runtime: {config.runtime} does not answer here; task=doctor shows what does")
        return
    if sys.platform != "linux":
        raise ValueError(f"isolation.kind: {config.kind} needs Linux; type env.isolation.kind={INPROCESS}")
    if config.require and (lacks := weaknesses(isolation_report(config).missing)):
        raise ValueError(
            f"isolation.require: this machine lacks: {describe_missing(lacks)}; set it to false to run without"
        )
