"""What a machine of a cluster has, and whether it reaches the others. Runs on that machine; judges nothing."""

from __future__ import annotations

import hashlib
import platform
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from grmpipe.config.isolation import IsolationConfig
from grmpipe.envs.isolation.env_host import check_isolation
from grmpipe.envs.isolation.isolation_report import describe_isolation
from grmpipe.run.doctor.doctor import ENGINE_BUILDS, NEEDED, cuda_problems, driver_version, version_of
from models.hub import missing_files
from scheduler.processes.node_address import node_address

PACKAGES = ("models", "scheduler", "grmpipe")
NCCL = "nvidia-nccl-cu13"
REACH_S = 3.0  # for another machine to accept a connection
SHARED_MEMORY = Path("/dev/shm")
TEMPORARY = Path("/tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A machine as one process on it sees it. versions: of packages, by name; of the project, a digest of its sources.

    cuda: what torch and the driver can't do together. models: role -> what its files lack here, empty if nothing.
    """

    address: str
    versions: dict[str, str]
    driver: str
    cuda: list[str]
    shm_free_gb: float
    temporary_free_gb: float
    folder_free_gb: float
    models: dict[str, str]


class NodeExaminer:
    """Examines the machine that it is made on."""

    def __init__(self, rank: int, world_size: int, init_method: str | None) -> None:
        self._rank, self._world_size, self._init_method = rank, world_size, init_method
        self._listening: list[socket.socket] = []

    def facts(self, address: str, folder: str, models: dict[str, str]) -> NodeFacts:
        """`folder`: of the run. `models`: role -> path."""
        import torch

        driver = driver_version()
        return NodeFacts(
            address=address,
            versions=versions(),
            driver=driver or "",
            cuda=cuda_problems(torch.__version__, torch.version.cuda, driver),
            shm_free_gb=free_gb(SHARED_MEMORY),
            temporary_free_gb=free_gb(TEMPORARY),
            folder_free_gb=free_gb(nearest(Path(folder))),
            models={role: missing_files(path) for role, path in models.items()},
        )

    def address(self) -> str:
        """The address by which other machines know this one."""
        return node_address()

    def now(self) -> float:
        """Seconds of this machine's clock."""
        return time.time()

    def listen(self, address: str) -> int:
        """Accept connections until the end. Returns the port."""
        listener = socket.create_server((address, 0), backlog=1024)
        self._listening.append(listener)
        return int(listener.getsockname()[1])

    def unreachable(self, others: Sequence[tuple[str, int]]) -> list[str]:
        """Which of these addresses don't accept a connection from here, and why."""
        found = []
        for host, port in others:
            try:
                socket.create_connection((host, port), timeout=REACH_S).close()
            except OSError as error:
                found.append(f"{host} ({error})")
        return found

    def write(self, folder: str, name: str) -> str:
        """Write a file there. Returns why it can't; empty if it can."""
        try:
            (nearest(Path(folder)) / name).write_text(name, encoding="utf-8")
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def unread(self, folder: str, names: Sequence[str]) -> list[str]:
        """Which of the files of other machines can't be read here."""
        return [name for name in names if not is_there(nearest(Path(folder)) / name)]

    def erase(self, folder: str, name: str) -> None:
        (nearest(Path(folder)) / name).unlink(missing_ok=True)

    def isolation(self, config: IsolationConfig) -> tuple[str, str]:
        """The isolation of environments that is had here; and what a configured one lacks, empty if nothing."""
        try:
            check_isolation(config)
        except ValueError as error:
            return describe_isolation(), str(error)
        return describe_isolation(), ""

    def gpus(self) -> list[str]:
        """The GPUs that a process with one of Ray's GPUs sees."""
        import torch

        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]

    def all_reduce(self, num_megabytes: int) -> float:
        """Sum a tensor over all machines as a learner's ranks do: by NCCL on GPUs, otherwise by gloo. A collective.

        Returns the seconds of the fastest of three. Raises ValueError for a wrong sum.
        """
        import torch
        import torch.distributed as dist

        from models.lm.ranks import choose_device, join_ranks

        device = choose_device("", self._rank)
        join_ranks(self._rank, self._world_size, self._init_method, device)
        seconds = []
        for _ in range(3):
            values = torch.full((num_megabytes << 18,), float(self._rank + 1), device=device)
            began = time.perf_counter()
            dist.all_reduce(values)
            total = float(values[-1])  # waits for the device
            seconds.append(time.perf_counter() - began)
            if total != self._world_size * (self._world_size + 1) / 2:
                raise ValueError(f"the sum over {self._world_size} machines is {total}")
        return min(seconds)

    def close(self) -> None:
        for listener in self._listening:
            listener.close()


def versions() -> dict[str, str]:
    """Package -> version, of all that must be the same on every machine."""
    found = {"python": platform.python_version(), "grmpipe": sources_digest()}
    return found | {name: version_of(name) or "missing" for name in (*NEEDED, *ENGINE_BUILDS, NCCL)}


def sources_digest() -> str:
    """A digest of the project's source files, wherever they are installed."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None, package
        folder = Path(spec.origin).parent
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{package}/{file.relative_to(folder)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def free_gb(folder: Path) -> float:
    """Free space; 0 if the folder doesn't exist."""
    try:
        return shutil.disk_usage(folder).free / 1e9
    except OSError:
        return 0.0


def nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((path for path in (folder, *folder.parents) if path.is_dir()), folder)


def is_there(file: Path) -> bool:
    try:
        return file.read_text(encoding="utf-8") == file.name
    except OSError:
        return False
