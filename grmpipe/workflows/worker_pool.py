"""Workflows in worker processes: one episode at a time in each, whose code may block. A broken one is replaced."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from typing import cast, get_args

import msgspec

from grmpipe.envs.env import EnvFault, PolicyFault
from grmpipe.envs.fault_owner import RaisedElsewhere
from grmpipe.envs.process_group import end_group, last_bytes, start_group
from grmpipe.scheduler.run_together import RemoteTraceback
from grmpipe.types import EnvCause
from grmpipe.workflows.chat import ChatRefused, RefusalCode
from grmpipe.workflows.in_process import workflow_at
from grmpipe.workflows.policy import Policy, Task
from grmpipe.workflows.worker_process import ANSWERS, Order, Raised, Returned, to_line

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 2**20
KEPT_OUTPUT_BYTES = 4000


class WorkerPool:
    """Worker processes, as many as there are open episodes. A worker is used again unless its episode was cut short.

    path: dotted path of the workflow. options: its further arguments.
    """

    def __init__(self, path: str, options: Mapping[str, object]) -> None:
        workflow_at(path, options)
        self._path, self._options = path, dict(options)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    async def solve(self, task: Task, policy: Policy) -> object:
        worker = self._idle.pop() if self._idle else await self._started()
        order = Order(target=self._path, options=self._options, task=task, endpoint=policy.endpoint)
        try:
            answer = await worker.answer(order)
        except BaseException:  # a cancelled episode too: the worker may still be at it
            self._all.discard(worker)
            await asyncio.shield(worker.end())
            raise
        self._idle.append(worker)
        return take_returned(answer)

    async def close(self) -> None:
        await asyncio.gather(*(worker.end() for worker in self._all))
        self._all.clear()

    async def _started(self) -> Worker:
        try:
            worker = await Worker.start()
        except OSError as error:
            raise EnvFault(f"no worker process could be started: {error}", "boot") from error
        self._all.add(worker)
        return worker


class Worker:
    """One process. Its own output is kept for errors, and shown nowhere else."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert process.stdout is not None
        self._process = process
        self._reader = reader
        self._writer = writer
        self._output = asyncio.ensure_future(last_bytes(process.stdout, KEPT_OUTPUT_BYTES))

    @staticmethod
    async def start() -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-m", "grmpipe.workflows.worker_process", str(fd)]
            env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            try:
                process = await start_group(command, env=env, inherited_fds=[fd], merged=True)
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        return Worker(process, reader, writer)

    async def answer(self, order: Order) -> Returned | Raised:
        """Raises EnvFault if the process dies, or says what isn't understood."""
        try:
            self._writer.write(to_line(order))
            await self._writer.drain()
            line = await self._reader.readline()
            if line:
                return ANSWERS.decode(line)
        except (msgspec.DecodeError, ValueError) as error:  # ValueError: a line without an end
            raise EnvFault(f"a worker process answered with something else: {error}", "protocol") from error
        except ConnectionError as error:
            raise EnvFault(f"a worker process died: {error}", "died") from error
        raise EnvFault(f"a worker process died; its last output: {await self._last_output()}", "died")

    async def end(self) -> None:
        self._writer.close()
        await end_group(self._process)
        self._output.cancel()

    async def _last_output(self) -> str:
        await end_group(self._process)
        return (await self._output).decode(errors="replace").strip()[-500:]


def take_returned(answer: Returned | Raised) -> object:
    """What the workflow returned. Raises what it raised."""
    if isinstance(answer, Returned):
        return answer.value
    if answer.error == "PolicyFault":
        raise PolicyFault(answer.text, answer.word)
    if answer.error == "EnvFault":
        cause = answer.word if answer.word in get_args(EnvCause) else "broken"
        raise EnvFault(answer.text, cast(EnvCause, cause))
    if answer.error == "ChatRefused":
        raise ChatRefused(cast(RefusalCode, answer.word), answer.text)
    raise RaisedElsewhere(answer.text, answer.types) from RemoteTraceback("a worker", answer.traceback)
