"""Starts the fork server of a run's environments, and takes a worker from it for each episode."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import IsolationConfig
from grmpipe.envs.env import EnvFault
from grmpipe.envs.limited_env import StageLimits
from grmpipe.envs.sandbox.bubblewrap import bubblewrap_missing, make_command
from grmpipe.envs.sandbox.confinement import Bounds, Missing
from grmpipe.envs.sandbox.crash_cleanup import MARK, CleanupRecord, remove_folder
from grmpipe.envs.sandbox.fork_server import MAX_CONTROL, Fork, ForkServerSetup, Ready, make_checked
from grmpipe.envs.sandbox.hosted_env import WorkerHost, end_within
from grmpipe.envs.sandbox.messages import BadFrame, Confined, Ended, next_message, reports
from grmpipe.envs.sandbox.readable_files import find_readable_files
from grmpipe.envs.sandbox.supervisor import KILL, TERMINATE
from grmpipe.models.import_path import list_import_paths

log = logging.getLogger(__name__)

# One thread: a library's pool of them does not survive a fork. One hash seed: the same episode, the same sets.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
BUBBLEWRAP = "bubblewrap"
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
SERVER_ENDS_S = 5.0
QUEUE_S = 0.002  # about the time of a fork


class ProcessWorker:
    """The run's end of a worker: a stream to its environment, and one to its supervisor."""

    def __init__(
        self,
        env: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        supervisor: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        words: socket.socket,
        folder: Path,
    ) -> None:
        """words: the socket of `supervisor`, written to past its stream: a failed write there loses unread reports."""
        self._folder = folder
        self.reader, self.writer = env
        self._reports, self._supervisor = supervisor
        self._words = words

    async def wait_ended(self) -> Ended | None:
        try:
            report = await next_message(self._reports, reports)
        except BadFrame:
            return None
        return report if isinstance(report, Ended) else None

    def terminate(self) -> None:
        self._say(TERMINATE)

    def kill(self) -> None:
        self._say(KILL)

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._words.send(word)

    def release(self) -> None:
        self.writer.transport.abort()
        self._supervisor.transport.abort()
        with contextlib.suppress(OSError):  # not empty where the worker had no file system of its own
            self._folder.rmdir()
            return
        remove_soon(self._folder)


class ProcessHost(WorkerHost):
    """The fork server, and the workers that it forked.

    without: parts of the isolation to do without, for tests.
    data: the run and its data, which no worker reads.
    outer: why the fork server isn't in bubblewrap; None: it is.
    """

    def __init__(
        self,
        config: EnvConfig,
        cleanup: CleanupRecord,
        limits: StageLimits,
        without: tuple[str, ...] = (),
        data: tuple[str, ...] = (),
    ) -> None:
        isolation = replace(config.isolation, read=make_absolute(config.isolation.read))
        super().__init__(replace(config, isolation=isolation), limits)
        self._folder = Path(cleanup.folder)
        self._cleanup = cleanup
        self._without = without
        self._data = tuple(make_absolute(data))
        self.outer = "left out" if BUBBLEWRAP in without else bubblewrap_missing()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()

    async def find_missing(self) -> tuple[Missing, ...]:
        """Found by taking a worker."""
        worker = await self.take_worker()
        try:
            async with asyncio.timeout(self.limits.boot_s):
                report = await next_message(worker.reader, reports)
            if not isinstance(report, Confined):
                raise EnvFault("a worker ended before it was confined", "boot")
            return report.missing
        except TimeoutError:
            took = (
                f"a worker wasn't confined within {self.limits.boot_s:g} s; type env.boot_s=... if this machine is slow"
            )
            raise EnvFault(took, "boot") from None
        finally:
            worker.kill()
            await end_within(worker.wait_ended(), SERVER_ENDS_S)
            worker.release()

    async def start(self) -> None:
        """Start the fork server."""
        inside = self._inside()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Its parent is this thread, with which it ends: asyncio's way would start it in another one.
            self._server = subprocess.Popen(  # noqa: ASYNC220
                [*inside, sys.executable, "-m", "grmpipe.envs.sandbox.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment(self._config.isolation.pass_env, self._cleanup.token),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._control = ours
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        setup = ForkServerSetup(env=self._config, data=self._data, in_own_root=self.outer is None)
        await loop.sock_sendall(ours, msgspec.msgpack.encode(setup))
        try:
            answer = await loop.sock_recv(ours, MAX_CONTROL)
        except ConnectionError:  # it ended without reading what it was sent
            answer = b""
        ready = msgspec.msgpack.decode(answer, type=Ready) if answer else Ready(error="the host of environments ended")
        if ready.error:
            await self.stop()
            raise ValueError(ready.error)

    def _inside(self) -> list[str]:
        """What starts the fork server: nothing, or bubblewrap, in which it finds only what it may read. Raises
        ValueError if the environment can't be imported.
        """
        if self.outer is not None:
            return []
        make_checked(self._config)  # an import may add folders to the path
        read = find_readable_files(self._config, self._data).parts
        return make_command(read, (str(self._folder),), network=self._config.isolation.network)

    async def stop(self) -> None:
        """End the workers that are still there, and the fork server."""
        await super().stop()
        server, control, self._server, self._control = self._server, self._control, None, None
        if control is not None:
            control.close()
        if server is None:
            return
        try:
            await asyncio.to_thread(server.wait, SERVER_ENDS_S)
        except subprocess.TimeoutExpired:
            server.kill()
            await asyncio.to_thread(server.wait)

    async def take_worker(self) -> ProcessWorker:
        """Fork a worker. Raises EnvFault if the fork server can't."""
        control = await self._running_server()
        self._taken += 1
        folder = self._folder / f"worker-{self._taken}"
        folder.mkdir()
        env, env_there = socket.socketpair()
        supervisor, supervisor_there = socket.socketpair()
        with contextlib.ExitStack() as undo:
            for each in (env, supervisor):
                undo.callback(each.close)
            with env_there, supervisor_there:
                await fork(
                    control, make_bounds(self._config.isolation, folder, self._without), env_there, supervisor_there
                )
            streams = await open_stream(env), await open_stream(supervisor)
            undo.pop_all()
        return ProcessWorker(*streams, supervisor, folder)

    async def _running_server(self) -> socket.socket:
        """The socket to the fork server, which is started again if it has ended."""
        async with self._starting:
            if self._server is not None and self._server.poll() is not None:
                log.warning("the host of environments has ended (%s); it is started again", self._server.returncode)
                await self.stop()
            if self._control is None:
                try:
                    await self.start()
                except ValueError as error:
                    raise EnvFault(f"the host of environments doesn't start: {error}", "boot") from None
            assert self._control is not None
            return self._control


async def fork(control: socket.socket, bounds: Bounds, *sockets: socket.socket) -> None:
    """Ask the fork server for a worker, and hand it the worker's sockets. Raises EnvFault."""
    message = msgspec.msgpack.encode(Fork(bounds=bounds))
    while True:
        try:
            socket.send_fds(control, [message], [each.fileno() for each in sockets])
            return
        except BlockingIOError:  # the kernel keeps ten messages; nothing wakes a sender of descriptors
            await asyncio.sleep(QUEUE_S)
        except OSError as error:
            raise EnvFault(f"the host of environments takes no more: {error}", "boot") from None


async def open_stream(connected: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(sock=connected, limit=2**20)


def make_bounds(config: IsolationConfig, folder: Path, without: tuple[str, ...]) -> Bounds:
    """What a worker may do, with its own folder."""
    return Bounds(
        folder=str(folder),
        memory_mb=config.memory_mb,
        cpu_s=config.cpu_s,
        max_processes=config.max_processes,
        file_mb=config.file_mb,
        network=config.network,
        without=without,
    )


def environment(names: Sequence[str], token: str) -> dict[str, str]:
    """The environment variables of workers: what Python needs, and those that the configuration names."""
    passed = {name: os.environ[name] for name in names if name in os.environ}
    paths = os.pathsep.join(list_import_paths())
    return {"PATH": DEFAULT_PATH, "PYTHONPATH": paths, **ENVIRONMENT, **passed, MARK: token}


def make_absolute(paths: Sequence[str]) -> list[str]:
    """In bubblewrap there may be no working folder."""
    return [str(Path(path).absolute()) for path in paths]


def remove_soon(folder: Path) -> None:
    """Delete a folder of any depth and with any rights in it, without waiting for it."""
    asyncio.get_running_loop().run_in_executor(None, remove_folder, folder)
