"""The run's end of one host of environments: asks it, counts its environments, knows whether it lives.

A host that dies, or doesn't answer within limits that it keeps itself, fails all its episodes: an EnvFault `died` each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

from grmpipe.envs.env import Action, EnvFault, Episode, Observation, Opening
from grmpipe.envs.limited_env import StageLimits
from grmpipe.envs.opened_envs import OpenedEnvs
from grmpipe.envs.sandbox.host_member import HostAnswer
from grmpipe.envs.sandbox.hosted_env import rebuild_fault
from grmpipe.envs.sandbox.messages import (
    BadFrame,
    Close,
    Observed,
    Open,
    Opened,
    Reply,
    Request,
    Step,
    decode_body,
    encode_body,
    reports,
)
from grmpipe.scheduler.processes.actors import ActorDied

Serve = Callable[[int, bytes], Awaitable[object]]  # HostMember.serve, in its process


@dataclass(slots=True, kw_only=True)
class HostProcess:
    """A process of a host, until its end. counts: what it last said. end: why it ended; empty while it lives."""

    counts: OpenedEnvs = field(default_factory=OpenedEnvs)
    end: str = ""


class RemoteHost:
    """A host: one process after another, on the same seat of its role.

    serve:   asks the present process. Raises ActorDied.
    counts:  those of all hosts together.
    on_end:  called once for each process that ended before the run did.
    """

    def __init__(self, name: str, serve: Serve, counts: OpenedEnvs, on_end: Callable[[RemoteHost], None]) -> None:
        self.name = name
        self.num_envs = 0
        self.last_number = -1  # the last environment that it was chosen for
        self.is_lost = False
        self._serve = serve
        self._counts = counts
        self._on_end = on_end
        self._process = HostProcess(end="it wasn't started")
        self._settled = asyncio.Event()  # it runs, or is lost

    @property
    def is_up(self) -> bool:
        return not self._process.end

    @property
    def last_end(self) -> str:
        """Why its last process ended."""
        return self._process.end

    def begin(self) -> None:
        """A process of it has started."""
        self._process = HostProcess()
        self._settled.set()

    def lose(self) -> None:
        """There will be no further process."""
        self.is_lost = True
        self._settled.set()

    async def process(self) -> HostProcess:
        """Its living process, which may still start. Raises EnvFault if there will be none."""
        await self._settled.wait()
        if self._process.end:
            raise EnvFault(self._words(self._process), "died")
        return self._process

    async def ask(self, process: HostProcess, number: int, request: Request, limit_s: float) -> Reply:
        """The reply for the environment of this number. Raises EnvFault if the process ends, or hangs."""
        if process.end:
            raise EnvFault(self._words(process), "died")
        try:
            async with asyncio.timeout(limit_s) as limit:
                answer = cast(HostAnswer, await self._serve(number, encode_body(request)))
            self.count(process, answer.counts)
            return cast(Reply, decode_body(reports, answer.reply))
        except BadFrame as error:
            raise EnvFault(str(error), "protocol") from None
        except ActorDied as death:
            self.end(process, death.reason)
        except TimeoutError:
            if not limit.expired():
                raise
            self.end(process, f"it did not answer within {limit_s:g} s, and keeps shorter limits itself")
        raise EnvFault(self._words(process), "died")

    def count(self, process: HostProcess, said: OpenedEnvs) -> None:
        """Add what a process counted since it was last asked. Answers may arrive in another order."""
        if process.end:  # what it held counts as killed
            return
        more = said.since(process.counts)
        process.counts.add(more)
        self._counts.add(more)

    def end(self, process: HostProcess, why: str, *, is_run_over: bool = False) -> None:
        """A process has ended, and with it all that lived in it."""
        if process.end:
            return
        process.end = why
        self._counts.killed += process.counts.open
        self._settled.clear()
        if not is_run_over:
            self._on_end(self)

    def _words(self, process: HostProcess) -> str:
        return f"the host {self.name} of its environment died: {process.end}"


class RemoteEnv:
    """An environment in a host: one episode, under its number.

    limits: longer than those that the host keeps itself.
    """

    def __init__(self, host: RemoteHost, number: int, limits: StageLimits) -> None:
        self._host = host
        self._number = number
        self._limits = limits
        self._process: HostProcess | None = None
        self._is_counted = False

    async def open(self, episode: Episode) -> Opening:
        self._host.num_envs += 1
        self._is_counted = True
        self._process = await self._host.process()
        reply = await self._host.ask(self._process, self._number, Open(episode), self._limits.boot_s)
        if isinstance(reply, Opened):
            return reply.opening
        raise rebuild_fault(reply)

    async def step(self, action: Action) -> Observation:
        if self._process is None:
            raise EnvFault("step of an environment that isn't open", "protocol")
        reply = await self._host.ask(self._process, self._number, Step(action), self._limits.step_s)
        if isinstance(reply, Observed):
            return reply.observation
        raise rebuild_fault(reply)

    async def close(self) -> None:
        try:
            if self._process is not None and not self._process.end:
                await self._host.ask(self._process, self._number, Close(), self._limits.close_s)
        finally:
            self._host.num_envs -= self._is_counted
            self._is_counted = False
