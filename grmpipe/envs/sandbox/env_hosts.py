"""The hosts of a run's environments, on the slots of a role: each episode goes to the host with the fewest, and a
dead host is replaced.
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import cast

from grmpipe.config.env import EnvConfig
from grmpipe.envs.env import Env
from grmpipe.envs.limited_env import LimitedEnv, StageLimits
from grmpipe.envs.opened_envs import OpenedEnvs
from grmpipe.envs.sandbox.env_host import longer
from grmpipe.envs.sandbox.host_member import HostStarted
from grmpipe.envs.sandbox.remote_host import RemoteEnv, RemoteHost
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import ActorDied, ActorRanks
from grmpipe.scheduler.slots.engine_replacement import RETRY_AFTER_S, HealthConfig
from grmpipe.scheduler.slots.replacement_tries import ReplacementTries

log = logging.getLogger(__name__)

Restart = Callable[[int], Awaitable[None]]  # rank -> restarts the member on its seat, after ending its rest
STOP_S = 30.0  # for a host to end its environments at the end of the run


class HostsLost(Exception):
    """No host of environments is left, and none will come."""


class EnvHosts:
    """All hosts of a role.

    counts: what became of all environments. What a host held when it died counts as killed.
    members: actors of HostMember, one per seat of the role.
    """

    def __init__(
        self,
        role: str,
        members: ActorRanks,
        *,
        restart: Restart,
        config: EnvConfig,
        health: HealthConfig,
        events: EventSink | None = None,
    ) -> None:
        self.role = role
        self.counts = OpenedEnvs()
        self.num_replaced = 0
        self._members = members
        self._restart = restart
        self._health = health
        self._events = events
        self._limits = longer(longer(StageLimits.of(config)))
        self._hosts = [
            RemoteHost(
                f"{role}-{rank}", functools.partial(members.call, rank, "serve"), self.counts, self._replace_soon
            )
            for rank in range(members.size)
        ]
        self._tries = ReplacementTries(health.max_replacements)
        self._numbers = itertools.count()
        self._replacing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Start all hosts. Raises ValueError if the environments can't be made, or isolated as required, on one."""
        for host, started in zip(self._hosts, await self._members.call_all("start"), strict=True):
            self._begin(host, cast(HostStarted, started))

    def env(self) -> Env:
        """A new environment, on the host with the fewest that are open. Raises HostsLost."""
        left = [host for host in self._hosts if not host.is_lost]
        if not left:
            first = self._hosts[0]
            raise HostsLost(f"all hosts of environments are lost; {first.name} died: {first.last_end}")
        # An environment counts from its opening on: of equal hosts the one that was chosen longest ago.
        host = min(left, key=lambda host: (not host.is_up, host.num_envs, host.last_number))
        host.last_number = next(self._numbers)
        env = RemoteEnv(host, host.last_number, self._limits)
        return LimitedEnv(env, longer(self._limits), self._events, lane=host.name)

    async def close(self) -> None:
        """End all hosts, with what still lives in them."""
        self._is_closed = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(self._stop(rank, host) for rank, host in enumerate(self._hosts) if host.is_up))

    async def _stop(self, rank: int, host: RemoteHost) -> None:
        process = await host.process()
        try:
            async with asyncio.timeout(STOP_S):
                host.count(process, cast(OpenedEnvs, await self._members.call(rank, "stop")))
        except (ActorDied, TimeoutError) as error:
            log.warning("%s didn't end in order: %s", host.name, error or f"it took longer than {STOP_S:g} s")
        host.end(process, "the run has ended", is_run_over=True)

    def _begin(self, host: RemoteHost, started: HostStarted) -> None:
        log.info("%s holds environments on %s", host.name, started.machine)
        if started.lacks:
            log.warning(
                "environments run with less isolation than they should on %s (%s): %s",
                started.machine, host.name, started.lacks,
            )  # fmt: skip
        host.begin()

    def _replace_soon(self, host: RemoteHost) -> None:
        log.warning("%s died: %s", host.name, host.last_end)
        if not self._is_closed:
            task = asyncio.create_task(self._replace(host))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _replace(self, host: RemoteHost) -> None:
        rank = self._hosts.index(host)
        while self._tries.may_try(host.name):
            try:
                async with asyncio.timeout(self._health.start_deadline_s):
                    await self._restart(rank)
                    started = cast(HostStarted, await self._members.call(rank, "start"))
            except Exception as failure:  # a process that starts may fail in any way
                log.warning("%s could not be replaced: %s", host.name, failure)
                await asyncio.sleep(RETRY_AFTER_S)
                continue
            self.num_replaced += 1
            self._begin(host, started)
            return
        log.warning("%s is lost: slots.health.max_replacements = %d", host.name, self._health.max_replacements)
        host.lose()
