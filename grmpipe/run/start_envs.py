"""Prepared run -> its environments: where they are made, how many at once, within which limits. Plays nothing."""

from __future__ import annotations

from dataclasses import dataclass

from grmpipe.config.env import EnvConfig
from grmpipe.envs.env_factory import MakeEnv, env_factory
from grmpipe.envs.limited_env import LimitedEnv, StageLimits
from grmpipe.envs.seats import Seats
from grmpipe.envs.tools.mcp_tools import McpServers
from grmpipe.workflows.workflow_runner import WorkflowRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Envs:
    """The environments of a run. make: a new one for each episode, unless the user's workflow plays it."""

    seats: Seats
    make: MakeEnv | None = None
    workflow: WorkflowRunner | None = None
    servers: McpServers | None = None

    async def close(self) -> None:
        """End what is still open."""
        if self.workflow is not None:
            await self.workflow.close()
        if self.servers is not None:
            await self.servers.close()


async def start_envs(config: EnvConfig) -> Envs:
    if config.env_kind.is_workflow:
        return Envs(workflow=WorkflowRunner(config), seats=Seats(config.capacity, config.boots_per_minute))
    servers = McpServers(config.mcp) if config.mcp else None
    make = env_factory(config, {} if servers is None else {"servers": servers})
    if config.env_kind.is_single:
        return Envs(make=make, seats=Seats())
    limits = StageLimits(
        boot_s=config.boot_s,
        step_s=config.step_s,
        close_s=config.close_s,
        max_observation_chars=config.max_observation_chars,
    )
    return Envs(
        make=lambda: LimitedEnv(make(), limits),
        seats=Seats(config.capacity, config.boots_per_minute),
        servers=servers,
    )
