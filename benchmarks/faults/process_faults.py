"""Faults that are put into a run from outside: into its processes while it goes on, into its files while it rests."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults.scenarios import AGENT, Scenario

STOPPED_S = 3.0
SHORT_S = 3.0
FULL_S = 2.0
READ_ONLY = "a read-only disk"
OUT_OF_MEMORY = "out of memory"
GROUPS = Path("/sys/fs/cgroup/memory")
FILLER = ".filler"
MARK = "GRMPIPE_CHAOS"  # in the environment of all processes of a run
CLOCK = "GRMPIPE_CHAOS_CLOCK"  # names the file by which the clock is set: clock/sitecustomize.py
JOURNALS = (
    "rollouts.jsonl",
    "judgements.jsonl",
    "groups.jsonl",
    "trained.jsonl",
    "metrics.jsonl",
    "eval_rollouts.jsonl",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run that goes on. output: what it and its earlier starts printed. command: what it was started by. memory: the
    control group of its processes, if any.
    """

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path
    command: Sequence[str]
    environment: Mapping[str, str]
    memory: Path | None = None

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        return "ready after" in self.output.read_text(errors="replace").rpartition("starting ")[2]


Strike = Callable[[Target, Random], str | None]  # returns what it hit; None: it found no target


def strike_driver(number: signal.Signals) -> Strike:
    def strike(target: Target, random: Random) -> str | None:
        target.process.send_signal(number)
        return "driver"

    return strike


def stop_driver(target: Target, random: Random) -> str | None:
    target.process.send_signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    target.process.send_signal(signal.SIGCONT)
    return "driver"


def strike_role(role: str, number: signal.Signals) -> Strike:
    def strike(target: Target, random: Random) -> str | None:
        try:
            os.kill(find_process(target, role), number)
        except ProcessLookupError:
            return None
        return role

    return strike


def stop_role(role: str) -> Strike:
    """Only once the run is ready: a start may take an hour, by the limit of its call, and a stopped one does."""
    stop = strike_role(role, STOP)
    return lambda target, random: stop(target, random) if target.is_ready else None


def cut_socket(role: str) -> Strike:
    """The connection by which its calls come, where we may take another process's descriptors."""

    def strike(target: Target, random: Random) -> str | None:
        try:
            process = find_process(target, role)
            shut_down(process, list_sockets(process, "unix", "/grmpipe-line-"), random)
        except (OSError, IndexError):  # it is gone, or closed
            return None
        return role

    return strike


def find_process(target: Target, role: str) -> int:
    """The newest process of a role. Raises ProcessLookupError."""
    log = target.run_dir / "run.log"
    found = re.findall(rf"{role} runs in process (\d+)", log.read_text()) if log.exists() else []
    if not found:
        raise ProcessLookupError
    return int(found[-1])


def strike_agent(number: signal.Signals) -> Strike:
    """The program of an episode, chosen at random."""

    def strike(target: Target, random: Random) -> str | None:
        try:
            os.kill(random.choice(find_agents(target)), number)
        except (ProcessLookupError, IndexError):
            return None
        return "an agent"

    return strike


def cut_gateway(target: Target, random: Random) -> str | None:
    """The connection by which an agent asks the policy."""
    try:
        process = random.choice(find_agents(target))
        shut_down(process, list_sockets(process, "tcp"), random)
    except (OSError, IndexError):  # none is there, or asks just now
        return None
    return "an agent"


def find_agents(target: Target) -> list[int]:
    marked = find_marked(target.environment[MARK])
    return [number for number, command in marked if str(AGENT).encode() in command.split(b"\0")]


def find_marked(mark: str) -> Iterator[tuple[int, bytes]]:
    """The processes with this mark in their environment, and their command lines."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name), (folder / "cmdline").read_bytes()
        except OSError:
            continue


def list_sockets(process: int, kind: str, path: str = "") -> list[int]:
    """The descriptors of a process that are connected sockets. kind: tcp; unix, at a path with this in it."""
    links = {link.name: link.readlink() for link in Path(f"/proc/{process}/fd").iterdir()}
    place = {"unix": 6, "tcp": 9}[kind]
    rows = (line.split() for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:])
    known = {f"socket:[{words[place]}]" for words in rows if path in words[-1]}
    return [int(name) for name, link in links.items() if str(link) in known]


def shut_down(process: int, sockets: Sequence[int], random: Random) -> None:
    """One of the sockets of a process, where we may take its descriptors. Raises IndexError without any, OSError."""
    with socket.socket(fileno=take_descriptor(process, random.choice(sockets))) as taken:
        taken.shutdown(socket.SHUT_RDWR)


def take_descriptor(process: int, number: int) -> int:
    """A copy of another process's descriptor: pidfd_getfd(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    of_process = os.pidfd_open(process)
    try:
        if (taken := libc.syscall(ctypes.c_long(438), of_process, number, 0)) < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        return int(taken)
    finally:
        os.close(of_process)


def start_again(target: Target, random: Random) -> str | None:
    """The same command beside the run must be refused, and change nothing."""
    try:
        second = subprocess.run(target.command, env=target.environment, capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:  # the run had ended, and this was it
        return None if not target.is_running else "second start, not refused: it goes on"
    if not target.is_running or (target.run_dir / "summary.json").exists():  # the run was over before
        return None
    return "second start" if second.returncode == 2 else f"second start, not refused: exit {second.returncode}"


def fill_disk(target: Target, random: Random) -> str | None:
    """Of a run whose directory is on a small disk of its own."""
    return "the run's disk" if fill(target.run_dir.parent) else None


def fill_temporary(target: Target, random: Random) -> str | None:
    """Where the run, and Ray, have their temporary files."""
    return "temporary files" if fill(Path(target.environment["TMPDIR"])) else None


def fill(disk: Path) -> bool:
    """Whether there is a disk of its own to fill."""
    if not disk.is_mount():
        return False
    filler = disk / FILLER
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    time.sleep(FULL_S)
    filler.unlink()
    return True


def take_memory(target: Target, random: Random) -> str | None:
    """So that the kernel kills the largest of its processes."""
    if (group := target.memory) is None:
        return None
    limit, stat = group / "memory.limit_in_bytes", read_numbers(group / "memory.stat")
    before = count_kills(group)
    try:
        limit.write_text(str(stat["total_rss"] + stat["total_shmem"] + (4 << 20)))
    except OSError:  # more than that was taken since
        return None
    until_s = time.monotonic() + SHORT_S
    while count_kills(group) == before and time.monotonic() < until_s:
        time.sleep(0.02)
    limit.write_text("-1")
    return "the largest process" if count_kills(group) > before else None


def count_kills(group: Path) -> int:
    return read_numbers(group / "memory.oom_control")["oom_kill"]


def read_numbers(path: Path) -> dict[str, int]:
    return {name: int(number) for name, number in (line.split() for line in path.read_text().splitlines())}


@contextmanager
def memory_group(name: str) -> Iterator[Path | None]:
    """Context: a control group for the memory of a run, where the kernel has them (version 1) and we may."""
    group = GROUPS / name
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        yield group
    finally:
        with suppress(OSError):  # a process is left, which is reported
            group.rmdir()


def jump_clock(target: Target, random: Random) -> str | None:
    """The wall clock of all its processes, by up to a day in any direction."""
    ahead_s = random.choice([-86400.0, -60.0, 60.0, 86400.0])
    with Path(target.environment[CLOCK]).open("r+b", buffering=0) as file:  # never empty: it is mapped
        file.write(struct.pack("d", ahead_s))
    return f"{ahead_s:+.0f} s"


def delete_checkpoints(target: Target, random: Random) -> str | None:
    folder = target.run_dir / "checkpoints"
    if not folder.is_dir():
        return None
    shutil.rmtree(folder, ignore_errors=True)
    return "checkpoints/"


# -- at rest -----------------------------------------------------------------------------------------------------------


def tear_tail(run_dir: Path, random: Random) -> str | None:
    """A line that was being written."""
    there = [name for name in JOURNALS if (run_dir / name).exists()]
    if not there:
        return None
    with (run_dir / (name := random.choice(there))).open("ab") as file:
        file.write(b'{"group_id":"g0000')
    return name


def damage_checkpoint(run_dir: Path, random: Random) -> str | None:
    """A byte of the newest checkpoint, where there is an older one."""
    published = sorted((run_dir / "checkpoints").glob("step_*[0-9]"), key=lambda path: path.stat().st_mtime_ns)
    if len(published) < 2:
        return None
    files = sorted(path for path in published[-1].rglob("*") if path.is_file() and path.stat().st_size)
    damaged = random.choice(files)
    content = bytearray(damaged.read_bytes())
    content[random.randrange(len(content))] ^= 0xFF
    damaged.write_bytes(content)
    return str(damaged.relative_to(published[-1]))


def lose_pointer(run_dir: Path, random: Random) -> str | None:
    pointer = run_dir / "checkpoints" / "latest"
    if not pointer.exists():
        return None
    pointer.unlink()
    return "checkpoints/latest"


def cut_summary(run_dir: Path, random: Random) -> str | None:
    (run_dir / "summary.json").write_text(json.dumps({"status": "completed"})[:9])
    return "summary.json"


def forbid_writing(run_dir: Path, random: Random) -> str | None:
    """The run's disk can't be written by the next start."""
    disk = run_dir.parent
    return str(disk.name) if disk.is_mount() and remount(disk, "ro") else None


def remount(disk: Path, how: str) -> bool:
    return (
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], capture_output=True, check=False).returncode == 0
    )


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
LIVE: dict[str, Strike] = {
    "kill -9 of the driver": strike_driver(KILL),
    **{number.name: strike_driver(number) for number in ENDING},
    "SIGSTOP and SIGCONT": stop_driver,
    "a second start": start_again,
    "a full disk": fill_disk,
    "full temporary files": fill_temporary,
    OUT_OF_MEMORY: take_memory,
    "deleted checkpoints": delete_checkpoints,
    "the clock jumps": jump_clock,
}
AT_REST: dict[str, Callable[[Path, Random], str | None]] = {
    "a torn journal": tear_tail,
    "a damaged checkpoint": damage_checkpoint,
    "a lost pointer": lose_pointer,
    "a cut summary": cut_summary,
    READ_ONLY: forbid_writing,
}


ON_AGENTS: dict[str, Strike] = {
    "kill -9 of an agent": strike_agent(KILL),
    "SIGSTOP of an agent": strike_agent(STOP),
    "a cut socket of an agent": cut_gateway,
}


def strikes_on(scenario: Scenario) -> dict[str, Strike]:
    """The faults for a run with these processes of its own. A learner that hangs is noticed by the limit of its calls,
    six minutes at least, so none is stopped.
    """
    own = {f"kill -9 of {role}": strike_role(role, KILL) for role in scenario.roles}
    own |= {f"a cut socket of {role}": cut_socket(role) for role in scenario.roles}
    engines = [role for role in scenario.roles if not role.startswith("learner")]
    own |= {f"SIGSTOP of {role}": stop_role(role) for role in engines}
    return LIVE | own | (ON_AGENTS if scenario.has_agents else {})
