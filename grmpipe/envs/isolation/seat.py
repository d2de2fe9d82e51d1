"""The process in which an environment lives: answers the run's requests, one at a time. Confines nothing."""

from __future__ import annotations

import asyncio
import random
import signal
import traceback
from collections.abc import Callable

from grmpipe.envs.env import Env, EnvFault, PolicyFault
from grmpipe.envs.isolation.messages import (
    BadFrame,
    Began,
    BlamedEnv,
    BlamedPolicy,
    Close,
    Closed,
    Open,
    Opened,
    Step,
    frame,
    next_request,
    observed,
)

MAX_DETAIL = 20_000  # characters of a traceback, or of a fault's text
LIMIT = "limit"  # the kind of a policy's fault: it reached a limit of its seat


async def serve(make: Callable[[], Env], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Play one episode by request, until `Close`, the end of the requests, or SIGTERM. Closes the environment once."""
    serving = asyncio.current_task()
    assert serving is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    env: Env | None = None
    request = None
    try:
        while (request := await next_request(reader)) is not None and not isinstance(request, Close):
            writer.write(frame(Began()))
            if env is None:
                env = make()
            writer.write(await answer(env, request))
            await writer.drain()
    except asyncio.CancelledError:  # SIGTERM
        request = None
    if env is not None:
        await close(env)
    if request is not None:
        writer.write(frame(Closed()))
        await writer.drain()


async def close(env: Env) -> None:
    """Close the environment. What it raises goes to stderr: its episode is over."""
    try:
        await env.close()
    except Exception:
        traceback.print_exc()


async def answer(env: Env, request: Open | Step) -> bytes:
    """The frame that answers a request. Whatever the environment raises becomes one."""
    try:
        if isinstance(request, Open):
            random.seed(request.episode.seed)
            return frame(Opened(await env.open(request.episode)))
        return observed(await env.step(request.action))
    except asyncio.CancelledError:
        raise
    except PolicyFault as fault:
        return frame(BlamedPolicy(text=str(fault)[:MAX_DETAIL], kind=fault.kind))
    except EnvFault as fault:
        return frame(BlamedEnv(detail=str(fault)[:MAX_DETAIL], cause=fault.cause))
    except MemoryError:
        if isinstance(request, Step):
            return frame(BlamedPolicy(text="it took more memory than it may", kind=LIMIT, ends=True))
        return frame(BlamedEnv(detail="no memory was left; raise env.isolation.memory_mb", cause="boot"))
    except BadFrame as error:
        return frame(BlamedEnv(detail=str(error), cause="protocol"))
    except BaseException:
        return frame(BlamedEnv(detail=traceback.format_exc()[-MAX_DETAIL:], cause="broken"))
