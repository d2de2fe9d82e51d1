"""What a run's environments would leave behind if the run were killed: a file that names it, and the sweep of it.

Processes end with the run by themselves; the sweep is for what couldn't: folders, containers, a process that hid.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

FOLDER = "env_hosts"  # in the run's directory
MARK = "GRMPIPE_ENVS"  # environment variable of all processes of a host
LABEL = "grmpipe.run"  # on its containers
ENDED = "ZX"  # states of a process whose parent hasn't asked for its end
COMMAND_S = 30.0


class CleanupRecord(msgspec.Struct, frozen=True):
    """What a host of environments would leave.

    token:   in the environment of its processes, and the label of its containers.
    folder:  which holds the folders of its workers.
    runtime: the command that ran its containers, or empty.
    machine: where all that is. owner, started: the run's process.
    """

    token: str
    folder: str
    runtime: str
    machine: str
    owner: int
    started: str


def record_host(run_dir: Path, runtime: str = "") -> CleanupRecord:
    """Make a folder for workers, and note it in the run's directory before anything else."""
    token = secrets.token_hex(8)
    folder = tempfile.mkdtemp(prefix=f"grmpipe-{token}-")
    Path(folder).chmod(0o711)  # the user of a worker gets through
    record = CleanupRecord(
        token=token,
        folder=folder,
        runtime=runtime,
        machine=socket.gethostname(),
        owner=os.getpid(),
        started=read_start(os.getpid()),
    )
    file = locate_record(run_dir, record)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(record))
    return record


def locate_record(run_dir: Path, record: CleanupRecord) -> Path:
    return run_dir / FOLDER / f"{record.token}.json"


def read_start(process: int) -> str:
    """When a process started, in ticks since the machine's start: with the id, it names one process. Empty: it has
    ended.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *values = stat.rpartition(")")[2].split()
    return "" if state in ENDED else values[18]


def sweep(run_dir: Path) -> int:
    """End and delete what killed processes of this run left on this machine. Returns the number of hosts that left
    something.
    """
    swept = 0
    for file in sorted((run_dir / FOLDER).glob("*.json")):
        try:
            record = msgspec.json.decode(file.read_bytes(), type=CleanupRecord)
        except (OSError, msgspec.DecodeError):  # half written: its folder is empty
            continue
        if record.machine == socket.gethostname() and read_start(record.owner) != record.started:
            clear(run_dir, record)
            swept += 1
    return swept


def clear(run_dir: Path, record: CleanupRecord) -> None:
    """End and delete all that a host has, and forget it."""
    for process in find_processes(record.token):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    if record.runtime:
        remove_containers(record.runtime, record.token)
    remove_folder(Path(record.folder))
    locate_record(run_dir, record).unlink(missing_ok=True)


def find_processes(token: str) -> Iterator[int]:
    """Processes that a host started, by their environment."""
    marked = f"{MARK}={token}".encode()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and marked in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def remove_containers(runtime: str, token: str) -> None:
    """Remove containers by their label. Apptainer has none: its containers are processes."""
    if runtime == "apptainer":
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = [runtime, "ps", "--all", "--quiet", "--filter", f"label={LABEL}={token}"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=COMMAND_S, check=False).stdout.split()
        if found:
            subprocess.run([runtime, "rm", "--force", *found], capture_output=True, timeout=COMMAND_S, check=False)


def remove_folder(folder: Path) -> None:
    """Delete a folder; also one that a program has made deep, or shut."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["chmod", "-R", "u+rwX", str(folder)], capture_output=True, timeout=COMMAND_S, check=False)
            subprocess.run(["rm", "-rf", "--", str(folder)], capture_output=True, timeout=COMMAND_S, check=False)
