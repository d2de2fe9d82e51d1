"""A program of an episode in its own process group, which ends with this process at the latest."""

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
END_S = 2.0  # for pipes to close after all processes of a group were killed
log = logging.getLogger(__name__)


def wrap_command(command: Sequence[str]) -> list[str]:
    """The command that runs a program in a group that ends with this process. It must begin a session of its own."""
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
    """Kill all processes of the group that are left. Returns the program's exit code; None if a process that left the
    group holds its pipes.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(END_S):
            return await process.wait()
    except TimeoutError:
        log.warning("a process of an episode left its group, and wasn't ended")
        return process.returncode


async def last_bytes(stream: asyncio.StreamReader, count: int) -> bytes:
    """Read a stream to its end. Returns its last bytes, at most `count`."""
    kept = b""
    while chunk := await stream.read(CHUNK_BYTES):
        kept = (kept + chunk)[-count:]
    return kept
