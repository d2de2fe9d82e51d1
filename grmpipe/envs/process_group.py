"""A program of an episode, which ends with all that it started when this process ends at the latest."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

SUPERVISOR = str(Path(__file__).with_name("process_supervisor.py"))
DIED_BY_SIGNAL = 128  # exit codes above it, as a shell has them
CHUNK_BYTES = 1 << 16
END_S = 2.0  # for the supervisor to end all; for pipes to close after that
log = logging.getLogger(__name__)


def wrap_command(command: Sequence[str]) -> list[str]:
    """The command that runs a program that ends with this process. It must begin a session of its own."""
    return [sys.executable, "-I", "-S", SUPERVISOR, str(os.getpid()), *command]


async def start_group(
    command: Sequence[str], *, env: Mapping[str, str], inherited_fds: Sequence[int] = (), merged: bool = False
) -> Process:
    """Start a program with pipes. merged: its stderr goes into its stdout. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *wrap_command(command),
        stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.STDOUT if merged else PIPE,
        env=dict(env), pass_fds=tuple(inherited_fds), start_new_session=True,
    )  # fmt: skip


async def wait_exited(process: Process) -> None:
    """Wait until the program has exited, though others of its group may still hold its pipes, which asyncio's own
    `wait` waits for.
    """
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    loop.add_reader(handle, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def end_group(process: Process) -> int | None:
    """Kill what is left of the program and of all that it started. Returns its exit code; None if a process that
    outlived its supervisor holds its pipes.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            os.kill(process.pid, signal.SIGTERM)  # `terminate` may reap it, and its exit code would be lost
            async with asyncio.timeout(END_S):
                await wait_exited(process)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(END_S):
            return await process.wait()
    except TimeoutError:
        log.warning("a process of an episode outlived its supervisor, and wasn't ended")
        return process.returncode


async def last_bytes(stream: asyncio.StreamReader, count: int) -> bytes:
    """Read a stream to its end. Returns its last bytes, at most `count`."""
    kept = b""
    while chunk := await stream.read(CHUNK_BYTES):
        kept = (kept + chunk)[-count:]
    return kept
