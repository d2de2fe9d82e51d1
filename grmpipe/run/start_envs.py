"""Prepared run -> its environments: where they live, how many at once, within which limits. Plays nothing."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from grmpipe.config.env import EnvConfig
from grmpipe.envs.env_factory import MakeEnv, env_factory
from grmpipe.envs.isolation.env_host import open_env_host
from grmpipe.envs.isolation.seat_counts import SeatCounts
from grmpipe.envs.seats import Seats
from grmpipe.envs.tools.mcp_tools import McpServers
from grmpipe.workflows.workflow_runner import WorkflowRunner
from scheduler.events import EventSink


@dataclass(frozen=True, slots=True, kw_only=True)
class Envs:
    """The environments of a run. make: a new one for each episode, unless the user's workflow plays it.

    counts: what became of those that were opened.
    """

    seats: Seats
    make: MakeEnv | None = None
    workflow: WorkflowRunner | None = None
    counts: SeatCounts = field(default_factory=SeatCounts)
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def close(self) -> None:
        """End what is still open."""
        await self.opened.aclose()


async def start_envs(config: EnvConfig, run_dir: Path, seed: int, events: EventSink) -> Envs:
    """Start what environments live in. Raises ValueError for a part of the isolation that is missing and required."""
    if config.env_kind.is_single:
        return Envs(make=env_factory(config), seats=Seats())
    seats = Seats(config.capacity, config.boots_per_minute)
    async with AsyncExitStack() as opening:
        if config.env_kind.is_workflow:
            workflow = WorkflowRunner(config, seed)
            opening.push_async_callback(workflow.close)
            return Envs(workflow=workflow, seats=seats, counts=workflow.counts, opened=opening.pop_all())
        arguments: dict[str, object] = {}
        if config.mcp:
            servers = arguments["servers"] = McpServers(config.mcp_servers)
            opening.push_async_callback(servers.close)
        host = await opening.enter_async_context(
            open_env_host(config, run_dir=run_dir, seed=seed, arguments=arguments, events=events)
        )
        return Envs(make=host.env, seats=seats, counts=host.seats, opened=opening.pop_all())
    raise AssertionError("an exit stack that hides an exception")
