"""A host of environments in a process of its own: opens, steps and closes them by number, as it is asked."""

import asyncio
import socket
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from grmpipe.config.env import EnvConfig
from grmpipe.envs.env import Env, EnvFault, PolicyFault
from grmpipe.envs.opened_envs import OpenedEnvs
from grmpipe.envs.sandbox.env_host import EnvHost, open_env_host
from grmpipe.envs.sandbox.messages import (
    BadFrame,
    BlamedEnv,
    Close,
    Closed,
    Observed,
    Open,
    Opened,
    Reply,
    Step,
    decode_body,
    encode_body,
    fit_observation,
    report_fault,
    requests,
)
from grmpipe.envs.tools.mcp_tools import check_servers


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetup:
    """What a host is made of.

    run_dir: where it notes what it would leave if it were killed; a folder that all machines share.
    data:    files that the environments don't read.
    paths:   that the run imports from; those that exist on the host's machine are added there.
    """

    config: EnvConfig
    run_dir: str
    data: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStarted:
    """Where a host runs. lacks: what its isolation lacks there, in words, or empty."""

    machine: str
    lacks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """The encoded reply to a request, and what became of the host's environments so far."""

    reply: bytes
    counts: OpenedEnvs


@dataclass(slots=True)
class OpenEnv:
    """An environment, and what it does now."""

    env: Env
    acting: asyncio.Task[Reply] | None = None


class HostMember:
    """The member of a group of hosts. Its methods overlap: one that waits holds up no other."""

    def __init__(self, setup: HostSetup, rank: int, world_size: int, init_method: str | None) -> None:
        self._setup = setup
        self._host: EnvHost | None = None
        self._held = AsyncExitStack()
        self._envs: dict[int, OpenEnv] = {}
        sys.path += [path for path in setup.paths if path not in sys.path and Path(path).exists()]

    async def start(self) -> HostStarted:
        """Raises ValueError, with the machine, if the environments can't be made there, or a part of the isolation is
        missing and required.
        """
        setup, machine = self._setup, socket.gethostname()
        try:
            if setup.config.mcp:
                await check_servers(setup.config)
            host = open_env_host(setup.config, run_dir=Path(setup.run_dir), data=setup.data)
            self._host = await self._held.enter_async_context(host)
        except ValueError as error:
            raise ValueError(f"{error} (on the machine {machine})") from error
        return HostStarted(machine=machine, lacks=self._host.lacks)

    async def serve(self, number: int, request: bytes) -> HostAnswer:
        """Answer an Open, Step or Close of the environment with this number."""
        assert self._host is not None, "call start first"
        asked = decode_body(requests, request)
        if isinstance(asked, Open):
            self._envs[number] = OpenEnv(self._host.env())
        reply: Reply = Closed()
        if (one := self._envs.get(number)) is None:  # its `open` was cancelled before it was sent
            reply = reply if isinstance(asked, Close) else BlamedEnv("it isn't open", "protocol")
        elif isinstance(asked, Close):
            del self._envs[number]
            await close(one)
        else:
            reply = await act(one, asked)
        return HostAnswer(reply=encode_reply(reply), counts=replace(self._host.counts))

    async def stop(self) -> OpenedEnvs:
        """End all environments, and what they live in."""
        envs, self._envs = list(self._envs.values()), {}
        await asyncio.gather(*map(close, envs))
        await self._held.aclose()
        return OpenedEnvs() if self._host is None else replace(self._host.counts)

    async def close(self) -> None:
        await self.stop()


async def act(one: OpenEnv, asked: Open | Step) -> Reply:
    """The environment's reply. It is cancelled by `close` alone: a caller that is gone closes it."""
    one.acting = asyncio.create_task(ask_env(one.env, asked))
    await asyncio.wait({one.acting})
    return BlamedEnv("it was closed meanwhile", "broken") if one.acting.cancelled() else one.acting.result()


async def close(one: OpenEnv) -> None:
    if one.acting is not None:
        one.acting.cancel()
        await asyncio.wait({one.acting})
    await one.env.close()


async def ask_env(env: Env, asked: Open | Step) -> Reply:
    try:
        if isinstance(asked, Open):
            return Opened(await env.open(asked.episode))
        return Observed(fit_observation(await env.step(asked.action)))
    except (PolicyFault, EnvFault) as fault:
        return report_fault(fault)


def encode_reply(reply: Reply) -> bytes:
    try:
        return encode_body(reply)
    except BadFrame as error:
        return encode_body(BlamedEnv(str(error), "protocol"))
