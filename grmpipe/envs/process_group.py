"""A program of an episode in its own process group, which ends with this process at the latest. Speaks with none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

SUPERVISOR = str(Path(__file__).with_name("process_supervisor.py"))
DIED_BY_SIGNAL = 128  # exit codes above it, as a shell has them
CHUNK_BYTES = 1 << 16


def supervised(command: Sequence[str]) -> list[str]:
    """The command that runs a program in a group that ends with this process. It must begin a session of its own."""
    return [sys.executable, "-I", "-S", SUPERVISOR, str(os.getpid()), *command]


async def start_group(
    command: Sequence[str], *, env: Mapping[str, str], inherited_fds: Sequence[int] = (), merged: bool = False
) -> Process:
    """Start a program with pipes. merged: its stderr goes into its stdout. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *supervised(command),
        stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.STDOUT if merged else PIPE,
        env=dict(env), pass_fds=tuple(inherited_fds), start_new_session=True,
    )  # fmt: skip


async def end_group(process: Process) -> None:
    """Kill all processes of the group that are left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def last_bytes(stream: asyncio.StreamReader, count: int) -> bytes:
    """Read a stream to its end. Returns its last bytes, at most `count`."""
    kept = b""
    while chunk := await stream.read(CHUNK_BYTES):
        kept = (kept + chunk)[-count:]
    return kept
