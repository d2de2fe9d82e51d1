"""Starts a container for each episode, by the command line of docker, podman or apptainer."""

import asyncio
import contextlib
import os
import signal
import struct
from pathlib import Path

import msgspec

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import IsolationConfig
from grmpipe.envs.env import EnvFault
from grmpipe.envs.limited_env import StageLimits
from grmpipe.envs.process_group import last_bytes
from grmpipe.envs.sandbox.confinement import MOST_FILES
from grmpipe.envs.sandbox.crash_cleanup import LABEL, CleanupRecord
from grmpipe.envs.sandbox.hosted_env import WorkerHost
from grmpipe.envs.sandbox.messages import Ended

APPTAINER = "apptainer"
INSIDE = ("python", "-m", "grmpipe.envs.sandbox.container_worker")
KILLED = 128 + signal.SIGKILL  # exit code of a container whose first process was killed
MAX_OUTPUT = 8192  # bytes of stderr that are kept
REMOVAL_S = 30.0  # for the runtime to remove a container
NO_USER = "65534:65534"


def command(config: IsolationConfig, token: str, name: str) -> list[str]:
    """The command line that runs one worker."""
    inside = [config.image, *INSIDE]
    if config.runtime == APPTAINER:
        return [APPTAINER, "exec", *apptainer_options(config), *inside]
    return [config.runtime, "run", *docker_options(config, token, name), *inside]


def docker_options(config: IsolationConfig, token: str, name: str) -> list[str]:
    """Options of docker and podman, which are the same."""
    options = [
        "--rm", "--interactive", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges",
        f"--user={NO_USER}", f"--name={name}", f"--label={LABEL}={token}",
        f"--memory={config.memory_mb}m", f"--memory-swap={config.memory_mb}m", f"--pids-limit={config.max_processes}",
        f"--ulimit=cpu={config.cpu_s}:{config.cpu_s}", f"--ulimit=nofile={MOST_FILES}:{MOST_FILES}",
        f"--tmpfs=/tmp:size={config.file_mb}m", "--workdir=/tmp", "--env=HOME=/tmp",
    ]  # fmt: skip
    options += [] if config.network else ["--network=none"]
    options += [f"--volume={Path(path).resolve()}:{Path(path).resolve()}:ro" for path in config.read]
    return options + [f"--env={name}" for name in config.pass_env]  # the value comes from the command's environment


def apptainer_options(config: IsolationConfig) -> list[str]:
    """Options of apptainer. Its image is read-only, its /tmp is in memory, and it has no rights to give."""
    options = [
        "--containall", "--no-home", "--no-privs", "--cleanenv", "--pwd=/tmp",
        f"--memory={config.memory_mb}M", f"--memory-swap={config.memory_mb}M", f"--pids-limit={config.max_processes}",
    ]  # fmt: skip
    options += [] if config.network else ["--net", "--network=none"]
    return options + [f"--bind={Path(path).resolve()}:{Path(path).resolve()}:ro" for path in config.read]


def command_environment(config: IsolationConfig) -> dict[str, str]:
    """The environment of the command, which may need its own settings; apptainer hands APPTAINERENV_ through."""
    passed = {f"APPTAINERENV_{name}": os.environ[name] for name in config.pass_env if name in os.environ}
    return dict(os.environ) | (passed if config.runtime == APPTAINER else {})


class ContainerWorker:
    """The run's end of a container: its stdin and stdout, and the process of the command that runs it."""

    def __init__(self, process: asyncio.subprocess.Process, runtime: str, name: str) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.reader, self.writer = process.stdout, process.stdin
        self._process = process
        self._runtime = runtime
        self._name = name
        self._killed = False
        self._removal: asyncio.Task[None] | None = None
        self._output = asyncio.create_task(last_bytes(process.stderr, MAX_OUTPUT))

    async def wait_ended(self) -> Ended | None:
        code = await self._process.wait()
        if self._removal is not None:
            await self._removal
        output = b""
        with contextlib.suppress(TimeoutError):  # a process outside may hold the pipe
            output = await asyncio.wait_for(asyncio.shield(self._output), 1.0)
        by_signal = -code if code < 0 else signal.SIGKILL if code == KILLED else 0
        return Ended(
            signal=by_signal,
            exit_code=0 if by_signal else code,
            limit="its memory or CPU time" if code == KILLED and not self._killed else "",
            output=output.decode("utf-8", "replace"),
        )

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()  # the command passes it on

    def kill(self) -> None:
        if not self._killed and self._process.returncode is None:
            self._killed = True
            self._removal = asyncio.create_task(self._remove())

    def release(self) -> None:
        self.kill()
        self.writer.close()
        self._output.cancel()

    async def _remove(self) -> None:
        """Kill the container, then the command: the container outlives it."""
        if self._runtime != APPTAINER:
            quiet = asyncio.subprocess.DEVNULL
            with contextlib.suppress(OSError):
                asked = (self._runtime, "rm", "--force", self._name)
                removing = await asyncio.create_subprocess_exec(*asked, stdin=quiet, stdout=quiet, stderr=quiet)
                try:
                    async with asyncio.timeout(REMOVAL_S):
                        await removing.wait()
                except TimeoutError:
                    removing.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class ContainerHost(WorkerHost):
    """Containers of one run, each with its label."""

    def __init__(self, config: EnvConfig, cleanup: CleanupRecord, limits: StageLimits) -> None:
        super().__init__(config, limits)
        self._token = cleanup.token

    async def start(self) -> None:
        """Nothing: each container imports the environment by itself."""

    async def take_worker(self) -> ContainerWorker:
        """Start a container. Raises EnvFault if the command can't be started."""
        isolation = self._config.isolation
        self._taken += 1
        name = f"grmpipe-{self._token}-{self._taken}"
        try:
            process = await asyncio.create_subprocess_exec(
                *command(isolation, self._token, name),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=command_environment(isolation),
                start_new_session=True,
                limit=2**20,
            )
        except OSError as error:
            raise EnvFault(f"{isolation.runtime} can't be started: {error}", "boot") from None
        worker = ContainerWorker(process, isolation.runtime, name)
        body = msgspec.msgpack.encode(self._config)
        worker.writer.write(struct.pack("<I", len(body)) + body)
        return worker
