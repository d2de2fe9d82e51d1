"""The first process of a container in which one environment lives: frames come by stdin, and go by stdout.

    python -m grmpipe.envs.isolation.container_seat

What the environment prints goes to stderr. The container's runtime confines it.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from grmpipe.config.env import EnvConfig
from grmpipe.envs.isolation.fork_server import checked
from grmpipe.envs.isolation.messages import BlamedEnv, Confined, body_of_next, frame
from grmpipe.envs.isolation.seat import serve


async def main() -> None:
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb"))
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, frames)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    body = await body_of_next(reader)
    if body is None:
        return
    try:
        make = checked(msgspec.msgpack.decode(body, type=EnvConfig))
    except ValueError as error:
        writer.write(frame(BlamedEnv(detail=str(error), cause="boot")))
        await writer.drain()
        return
    writer.write(frame(Confined()))
    await serve(make(), reader, writer)


if __name__ == "__main__":
    asyncio.run(main())
    sys.stderr.flush()
    os._exit(0)
