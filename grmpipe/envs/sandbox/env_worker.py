"""The process in which an environment lives: answers the run's requests, one at a time."""

import asyncio
import os
import random
import signal
import sys
import traceback

from grmpipe.envs.env import Env, EnvFault, PolicyFault
from grmpipe.envs.fault_owner import FaultRules, decide_fault
from grmpipe.envs.sandbox.messages import (
    BadFrame,
    Began,
    BlamedEnv,
    Close,
    Closed,
    Observed,
    Open,
    Opened,
    Step,
    fit_observation,
    frame,
    next_message,
    report_fault,
    requests,
)

STOPPED = 128 + signal.SIGTERM  # the exit code of a worker that was asked to end before its `Close`


async def serve(env: Env, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Play one episode by request, until `Close`, the end of the requests, or SIGTERM, which ends the process. Closes
    the environment once. env: raises only PolicyFault and EnvFault.
    """
    serving = asyncio.current_task()
    assert serving is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    for number in (signal.SIGINT, signal.SIGHUP):  # a run in the background, or under nohup, ignores them
        signal.signal(number, signal.SIG_DFL)  # the first process of a namespace gets none from within
    request, is_stopped = None, False
    try:
        while (request := await next_message(reader, requests)) is not None and not isinstance(request, Close):
            writer.write(frame(Began()))
            writer.write(await answer(env, request))
            await writer.drain()
    except asyncio.CancelledError:  # SIGTERM
        request, is_stopped = None, True
    await close(env)
    if is_stopped:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STOPPED)
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
        return frame(Observed(fit_observation(await env.step(request.action))))
    except asyncio.CancelledError:
        raise
    except (PolicyFault, EnvFault) as fault:
        return frame(report_fault(fault))
    except BadFrame as error:
        return frame(BlamedEnv(detail=str(error), cause="protocol"))
    except BaseException as error:  # ours, at a limit: an environment's own are faults
        acted = isinstance(request, Step)
        return frame(report_fault(decide_fault(error, "the worker", FaultRules(in_box=True), has_acted=acted)))
