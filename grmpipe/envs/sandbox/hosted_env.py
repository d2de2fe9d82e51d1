"""An environment that lives in a worker of its own, as the run sees it: an Env like any other.

What an end of the worker means is decided here, from what the worker and its supervisor report:

    in `open`                      the environment's: EnvFault `boot`, `timeout` or `died`
    in `step`, before it began     the environment's: EnvFault `timeout` or `died`, unless it comes from a step before
    in `step`, at a limit          the policy's: the episode ends (`done`) with the fault `limit`, and is judged as it
      (time, CPU time, memory,     is; its worker is killed, so there is nothing to go on with
      files, processes), and by a
      signal that programs send
    in `step`, by any other end    the environment's: EnvFault `died`
    a frame that can't be read     the environment's: EnvFault `protocol`

A program of the policy that runs inside of the environment's own process (as by `exec`) can answer in its place: one
that is started as a process of its own can't.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Protocol

from grmpipe.config.env import EnvConfig
from grmpipe.envs.env import Action, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.envs.fault_owner import LIMIT, policys_end
from grmpipe.envs.limited_env import StageLimits
from grmpipe.envs.opened_envs import OpenedEnvs
from grmpipe.envs.sandbox.confinement import Missing
from grmpipe.envs.sandbox.env_worker import STOPPED
from grmpipe.envs.sandbox.messages import (
    BadFrame,
    Began,
    BlamedEnv,
    BlamedPolicy,
    Close,
    Closed,
    Confined,
    Ended,
    Observed,
    Open,
    Opened,
    Reply,
    Request,
    Step,
    frame,
    next_message,
    reports,
)
from grmpipe.scheduler.run_together import RemoteTraceback
from grmpipe.types import EnvCause

log = logging.getLogger(__name__)

ENDING_S = 5.0  # until a killed worker has ended
OWN_END_S = 1.0  # until a worker has ended that says no more


class WorkerLink(Protocol):
    """The run's end of a worker: frames to and from its environment, and words to whatever watches over it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def wait_ended(self) -> Ended | None:
        """How the worker ended, once all of it has. None if what watched over it is gone too."""
        ...

    def terminate(self) -> None:
        """SIGTERM to the environment's process."""
        ...

    def kill(self) -> None:
        """SIGKILL to all processes of the worker."""
        ...

    def release(self) -> None:
        """Free what the run holds of the worker. It ends, if it hasn't."""
        ...


class WorkerEnded(Exception):
    """The worker's environment says no more."""


class HostedEnv:
    """One episode in one worker, which `open` takes, and any end gives back.

    take_worker: starts a worker, and leaves nothing if it is cancelled. Raises EnvFault.
    taken:     holds this environment while it has its worker.
    """

    def __init__(
        self,
        take_worker: Callable[[], Awaitable[WorkerLink]],
        *,
        limits: StageLimits,
        counts: OpenedEnvs,
        taken: set[HostedEnv],
    ) -> None:
        self._take_worker = take_worker
        self._limits = limits
        self._counts = counts
        self._taken = taken
        self._worker: WorkerLink | None = None
        self._began = False
        self._is_step = False
        self._has_acted = False  # a step has begun
        self._owes_reply = False
        self._ending: asyncio.Task[Ended | None] | None = None  # the worker's last report
        self.missing: tuple[Missing, ...] = ()  # what its worker couldn't give up; known once it is open

    async def open(self, episode: Episode) -> Opening:
        boot_s = self._limits.boot_s
        try:
            async with asyncio.timeout(boot_s):
                self._worker = await self._take_worker()
                self._counts.opened += 1
                self._taken.add(self)
                reply = await self._asked(Open(episode))
        except TimeoutError:
            raise make_fault("timeout", f"open did not return in {boot_s:g} s", await self.kill()) from None
        except BadFrame as error:
            raise make_fault("protocol", str(error), await self.kill()) from None
        except WorkerEnded:
            raise make_fault("died", "its process ended in open", await self.kill(OWN_END_S)) from None
        if isinstance(reply, Opened):
            return reply.opening
        raise rebuild_fault(reply)

    async def step(self, action: Action) -> Observation:
        if self._worker is None:
            raise EnvFault("step of an environment that isn't open", "protocol")
        step_s = self._limits.step_s
        try:
            async with asyncio.timeout(step_s):
                reply = await self._asked(Step(action))
        except TimeoutError:
            ended = await self.kill()
            if self._began:
                return make_limit_observation(f"stopped after {step_s:g} s", ended)
            raise make_fault("timeout", f"the step did not begin in {step_s:g} s", ended) from None
        except BadFrame as error:
            raise make_fault("protocol", str(error), await self.kill()) from None
        except WorkerEnded:
            return self._ended_in_step(await self.kill(OWN_END_S))
        if isinstance(reply, BlamedPolicy) and reply.ends and reply.kind == LIMIT:
            return make_limit_observation(reply.text, await self.kill())
        if not isinstance(reply, Observed):
            raise rebuild_fault(reply)
        return reply.observation

    async def close(self) -> None:
        """Ends the worker: by `close` of the environment, else by SIGTERM, else by SIGKILL, each after its limit."""
        worker, close_s = self._worker, self._limits.close_s
        if worker is None:
            return
        ended: Ended | None = None
        is_closed = False
        try:
            if not self._owes_reply:
                is_closed = await self._said_goodbye(worker)
            if not is_closed:
                worker.terminate()
            ended = await self._end_within(worker, close_s)
            if ended is None:
                is_closed = False
                worker.kill()
                ended = await self._end_within(worker, ENDING_S)
        finally:
            self._give_back(is_closed=is_closed and ended is not None)

    async def kill(self, after_s: float = 0.0) -> Ended | None:
        """Kill the worker, if there is one, and give it back.

        after_s: time in which it may end by itself: killed before it could tell, it would hide its limit.
        """
        worker = self._worker
        if worker is None:
            return None
        try:
            if after_s and (ended := await self._end_within(worker, after_s)) is not None:
                return ended
            worker.kill()
            return await self._end_within(worker, ENDING_S)
        finally:
            self._give_back(is_closed=False)

    async def _asked(self, request: Open | Step) -> Opened | Observed | BlamedPolicy | BlamedEnv:
        """The reply to a request. Raises WorkerEnded, BadFrame."""
        assert self._worker is not None
        self._began, self._owes_reply, self._is_step = False, True, isinstance(request, Step)
        await self._send(request)
        reply = await self._reply()
        self._owes_reply = False
        if isinstance(reply, Closed):
            raise BadFrame("the environment closed itself")
        return reply

    async def _send(self, request: Request) -> None:
        assert self._worker is not None
        try:
            self._worker.writer.write(frame(request))
            await self._worker.writer.drain()
        except ConnectionError:
            raise WorkerEnded from None

    async def _reply(self) -> Reply:
        assert self._worker is not None
        while True:
            report = await next_message(self._worker.reader, reports)
            if isinstance(report, Began):
                self._began = True
                self._has_acted |= self._is_step
            elif report is None:
                raise WorkerEnded
            elif isinstance(report, Ended):
                raise BadFrame("the environment spoke for its supervisor")
            elif isinstance(report, Confined):
                self.missing = report.missing
            else:
                return report

    def _ended_in_step(self, ended: Ended | None) -> Observation:
        """What the policy's program did, if it ran. Raises EnvFault for any other end."""
        if self._has_acted and ended is not None:
            stopped_by = signal.SIGTERM if ended.exit_code == STOPPED else ended.signal
            if how := policys_end(stopped_by, ended.limit):
                return make_limit_observation(f"stopped by {how}", ended)
        raise make_fault("died", "its process ended in a step", ended)

    async def _said_goodbye(self, worker: WorkerLink) -> bool:
        """Whether the environment has closed in time."""
        try:
            async with asyncio.timeout(self._limits.close_s):
                await self._send(Close())
                return isinstance(await self._reply(), Closed)
        except (TimeoutError, WorkerEnded, BadFrame):
            return False

    async def _end_within(self, worker: WorkerLink, limit_s: float) -> Ended | None:
        """How the worker ended; None if it hasn't by then. A run that stops kills it while its episode closes it: both
        get the one report.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(worker.wait_ended())
        return await end_within(asyncio.shield(self._ending), limit_s)

    def _give_back(self, *, is_closed: bool) -> None:
        if self._worker is not None:
            self._worker.release()
            self._worker = None
            self._taken.discard(self)
            self._counts.closed += is_closed
            self._counts.killed += not is_closed


class WorkerHost(ABC):
    """What the environments of one run live in, a worker each."""

    def __init__(self, config: EnvConfig, limits: StageLimits) -> None:
        self.counts = OpenedEnvs()
        self.limits = limits
        self._config = config
        self._working: set[HostedEnv] = set()
        self._taken = 0

    def env(self) -> HostedEnv:
        return HostedEnv(self.take_worker, limits=self.limits, counts=self.counts, taken=self._working)

    @abstractmethod
    async def take_worker(self) -> WorkerLink:
        """Start a worker. Raises EnvFault."""

    @abstractmethod
    async def start(self) -> None:
        """Start what workers have in common. Raises ValueError if the environment can't be made."""

    async def find_missing(self) -> tuple[Missing, ...]:
        """What workers can't give up on this machine, as far as it shows before an episode. Raises EnvFault."""
        return ()

    async def stop(self) -> None:
        """End the workers that are still there."""
        for env in tuple(self._working):
            await env.kill()


async def end_within(ending: Awaitable[Ended | None], limit_s: float) -> Ended | None:
    try:
        async with asyncio.timeout(limit_s):
            return await ending
    except TimeoutError:
        return None


def make_fault(cause: EnvCause, text: str, ended: Ended | None) -> EnvFault:
    """The environment's fault, with how its process ended, and the end of what it wrote."""
    how = ""
    if ended is not None:
        by = f"by {signal.Signals(ended.signal).name}" if ended.signal else f"with exit code {ended.exit_code}"
        reached = f", at its limit of {ended.limit}" if ended.limit else ""
        how = f" ({by}{reached}{f', after {ended.cpu_s:.1f} s of CPU time' if ended.cpu_s else ''})"
        how += f"; its last output:\n{ended.output}" if ended.output else ""
    return EnvFault(f"{text}{how}", cause)


def rebuild_fault(reply: Reply) -> PolicyFault | EnvFault:
    """The fault that a worker reports, to be raised again."""
    if isinstance(reply, BlamedPolicy):
        return PolicyFault(reply.text, reply.kind, ends=reply.ends)
    if isinstance(reply, BlamedEnv):
        fault = EnvFault(reply.detail, reply.cause)
        fault.__cause__ = RemoteTraceback("an environment's process", reply.trace) if reply.trace else None
        return fault
    return EnvFault(f"the environment answered with {type(reply).__name__}", "protocol")


def make_limit_observation(text: str, ended: Ended | None) -> Observation:
    """The end of an episode by the policy's own program."""
    log.debug("an episode ended at a limit of its worker: %s; %s", text, ended)
    return Observation(done=True, faults=(LIMIT,))
