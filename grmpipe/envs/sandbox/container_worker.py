"""The first processes of a container in which one environment lives: frames come by stdin, and go by stdout.

    python -m grmpipe.envs.sandbox.container_worker

The first only waits. The environment lives in its child, and what that prints goes to stderr. The container's runtime
confines both; that neither memory nor descriptors of the two are open to programs of the policy is done here.
"""

import asyncio
import os
import signal
import sys
from typing import NoReturn

import msgspec

from grmpipe.config.env import EnvConfig
from grmpipe.envs.sandbox import kernel, seccomp
from grmpipe.envs.sandbox.confinement import IsolationSteps, Missing
from grmpipe.envs.sandbox.env_worker import serve
from grmpipe.envs.sandbox.fork_server import make_checked
from grmpipe.envs.sandbox.messages import BlamedEnv, Confined, body_of_next, frame


def confine() -> tuple[Missing, ...]:
    """Give up what a runtime leaves. Returns what couldn't be given up."""
    steps = IsolationSteps()
    steps.take("no new privileges", kernel.set_no_new_privileges)
    steps.take("filter of system calls", seccomp.restrict)
    steps.take("memory and descriptors of its own", kernel.hide_from_others)
    return tuple(steps.missing)


def wait_for(child: int) -> NoReturn:
    """Wait for all that ends in the container, pass SIGTERM on, and end as the environment's process ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


async def main(missing: tuple[Missing, ...]) -> None:
    frames, asked = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # programs inherit it
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), asked)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, frames)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    body = await body_of_next(reader)
    if body is None:
        return
    try:
        make = make_checked(msgspec.msgpack.decode(body, type=EnvConfig))
    except ValueError as error:
        writer.write(frame(BlamedEnv(detail=str(error), cause="boot")))
        await writer.drain()
        return
    writer.write(frame(Confined(missing=missing)))
    await serve(make(), reader, writer)


if __name__ == "__main__":
    lacking = confine()
    first = os.getpid()
    if (worker := os.fork()) != 0:
        wait_for(worker)
    kernel.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() == first:
        asyncio.run(main(lacking))
    sys.stderr.flush()
    os._exit(0)
