"""What a machine of a cluster has, and whether it reaches the others. Runs on that machine."""

import hashlib
import platform
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from grmpipe.config.isolation import IsolationConfig
from grmpipe.envs.sandbox.env_host import check_isolation
from grmpipe.envs.sandbox.isolation_report import describe_isolation
from grmpipe.models.hub import find_missing_files
from grmpipe.run.doctor.doctor import ENGINE_BUILDS, NEEDED, cuda_problems, driver_version, find_version
from grmpipe.scheduler.processes.node_address import node_address

NCCL = "nvidia-nccl-cu13"
REACH_S = 3.0  # for another machine to accept a connection
SHARED_MEMORY, TEMPORARY = Path("/dev/shm"), Path("/tmp")
LEAST_SHM_GB = {False: 0.2, True: 8.0}  # by whether a machine has GPUs: vLLM and NCCL on it use more
LEAST_DISK_GB = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check on one machine. `text`: what was found, or what to do."""

    check: str
    ok: bool
    text: str
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a run needs of every machine. versions: the driver's. models: role -> path. isolation: its environments',
    if they have hosts.
    """

    versions: Mapping[str, str]
    folder: str
    checkpoints_gb: float
    models: Mapping[str, str]
    isolation: IsolationConfig | None = None


class NodeExaminer:
    """Examines the machine that it is made on."""

    def __init__(self, rank: int, world_size: int, init_method: str | None) -> None:
        self._rank, self._world_size, self._init_method = rank, world_size, init_method
        self._listening: list[socket.socket] = []

    def examine(self, expected: Expected, has_gpus: bool) -> list[Finding]:
        """What this machine has for itself."""
        found = [
            versions_found(versions(), expected.versions),
            cuda_found(driver_version() or "", has_gpus),
            *space_found(has_gpus, expected.checkpoints_gb, Path(expected.folder)),
        ]
        for role, path in expected.models.items():
            lacking = find_missing_files(path)
            found.append(Finding(check=f"{role}'s files", ok=not lacking, text=lacking or "complete"))
        return found if expected.isolation is None else [*found, isolation_found(expected.isolation)]

    def address(self) -> str:
        """The address by which other machines know this one."""
        return node_address()

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

        from grmpipe.models.lm.parallel.ranks import choose_device, join_ranks

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


def versions_found(found: Mapping[str, str], own: Mapping[str, str]) -> Finding:
    """Whether packages and the project are those of the driver."""
    other = [f"{name} {found.get(name)} (driver: {own[name]})" for name in own if found.get(name) != own[name]]
    text = f"grmpipe {own['grmpipe']}, torch {own['torch']}"
    if other:
        text = f"{', '.join(other)}: install the same on all machines"
    return Finding(check="versions", ok=not other, text=text)


def cuda_found(driver: str, has_gpus: bool) -> Finding:
    """Whether the driver can run torch's CUDA."""
    import torch

    problems = cuda_problems(torch.__version__, torch.version.cuda, driver or None)
    if has_gpus and not driver:
        problems.append("Ray has GPUs here, but there is no NVIDIA driver; in a container use --gpus all")
    text = "; ".join(problems) or (f"driver {driver}" if driver else "no GPU, no driver")
    return Finding(check="CUDA", ok=not problems, text=text)


def space_found(has_gpus: bool, checkpoints_gb: float, folder: Path) -> list[Finding]:
    """Whether shared memory and disks have room."""
    shm_gb, disk_gb = LEAST_SHM_GB[has_gpus], max(LEAST_DISK_GB, checkpoints_gb)
    grow = f"it needs {shm_gb:g}: mount a larger one (docker run --shm-size=64g)"
    spill = f"Ray's logs and spilled objects need {LEAST_DISK_GB:g}: free some, or start Ray with --temp-dir"
    more = f"{disk_gb:.0f} are needed for checkpoints: free some, or lower train.keep_checkpoints"
    return [
        room_found("/dev/shm", SHARED_MEMORY, shm_gb, grow),
        room_found("/tmp", TEMPORARY, LEAST_DISK_GB, spill),
        room_found("run's disk", nearest(folder), disk_gb, more),
    ]


def room_found(check: str, folder: Path, least_gb: float, remedy: str) -> Finding:
    free = free_gb(folder)
    ok = free >= least_gb
    return Finding(check=check, ok=ok, text=f"{free:.1f} GB free{'' if ok else f'; {remedy}'}")


def isolation_found(config: IsolationConfig) -> Finding:
    """The isolation that environments would have here, as one of the role's hosts may be here."""
    try:
        check_isolation(config)
    except ValueError as error:
        return Finding(check="isolation", ok=False, text=f"env.{error}")
    return Finding(check="isolation", ok=True, text=describe_isolation())


def versions() -> dict[str, str]:
    """Package -> version, of all that must be the same on every machine; of the project, a digest of its sources."""
    found = {"python": platform.python_version(), "grmpipe": sources_digest()}
    return found | {name: find_version(name) or "missing" for name in (*NEEDED, *ENGINE_BUILDS, NCCL)}


def sources_digest() -> str:
    """A digest of the project's source files, wherever they are installed."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    # Unlike Path.rglob it follows links: a link in a checkout is a folder in a wheel, and where Ray sends it.
    for name in sorted(glob("**/*.py", root_dir=package, recursive=True)):  # noqa: PTH207
        digest.update(f"{name}\0".encode())
        digest.update((package / name).read_bytes())
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
