"""The process between a host and a worker: enters the namespaces, forks the worker, keeps the end of its output, adds
up its memory, kills it with all that it started, and reports how it ended.

It ends the worker at the run's word, and when the run or the host has ended: its socket to the run closes, or it gets
SIGTERM from the kernel.
"""

import contextlib
import math
import os
import re
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from grmpipe.envs.sandbox import kernel
from grmpipe.envs.sandbox.confinement import (
    MEGABYTE,
    Bounds,
    Missing,
    Namespaces,
    confine,
    enter_namespaces,
    map_ids,
)
from grmpipe.envs.sandbox.messages import Ended, frame

TERMINATE, KILL = b"t", b"k"  # words of the run: SIGTERM, SIGKILL
MAPPED, REFUSED = b"y", b"n"  # answers of the host
MAX_OUTPUT = 8192  # bytes of stdout and stderr that are kept
MAX_LEFT = 2**20  # bytes of output that are read after the end
PIECE = 2**16  # bytes, as many as a pipe holds
CPU_MARGIN_S = 0.25  # the kernel counts CPU time in ticks
MAPPING_S = 5.0  # until a supervisor has entered its namespaces
MEMORY_S = 0.1  # between two sums of the memory of a worker
KILLING_S = 5.0  # until the descendants of a worker without process namespace have ended


def supervise(
    bounds: Bounds,
    run: socket.socket,
    env: socket.socket,
    host: socket.socket,
    live: Callable[[tuple[Missing, ...]], None],
) -> None:
    """Fork a worker that does `live`, and stay until all of it has ended. `live` gets what its confinement lacks.

    run:  on which the run's words come, and the end is reported.
    env:  the worker's own, for its environment.
    host: on which the host maps users, until it is closed.
    """
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    kernel.adopt_orphans()
    with host:
        had = enter_namespaces(bounds, lambda user: ask_to_map(host, user))
    kernel.hide_from_others()
    kernel.set_parent_death_signal(signal.SIGTERM)
    output, inherited = os.pipe()
    # Before the fork: the worker may mount a /proc of its own, in which this process isn't, at any time after it.
    imported_bytes = own_bytes(os.getpid())
    worker = os.fork()
    if worker == 0:
        os.close(output)
        run.close()
        become_worker(bounds, had, inherited, live)
    os.close(inherited)
    env.close()
    supervisor = _Supervisor(worker, output, run, bounds, imported_bytes)
    signal.signal(signal.SIGTERM, lambda number, frame: supervisor.kill())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    supervisor.stay()


def ask_to_map(host: socket.socket, user: int) -> None:
    """The host maps a user of the worker into the namespace of this process. Raises PermissionError."""
    host.sendall(user.to_bytes(8, "little"))
    if host.recv(1) != MAPPED:
        raise PermissionError(1, "this user may not map another one")


def map_users_when_asked(supervisor: socket.socket, process: int) -> None:
    """The host's end of `ask_to_map`: only a parent with root's rights can map users of `process`."""
    supervisor.settimeout(MAPPING_S)
    try:
        asked = supervisor.recv(8)
    except OSError:
        return
    if not asked:
        return
    try:
        map_ids(process, int.from_bytes(asked, "little"))
        answer = MAPPED
    except OSError:
        answer = REFUSED
    with contextlib.suppress(OSError):
        supervisor.sendall(answer)


def become_worker(bounds: Bounds, had: Namespaces, output: int, live: Callable[[tuple[Missing, ...]], None]) -> None:
    """Does `live` in the worker's process, which ends here."""
    code = 1
    try:
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        missing = confine(bounds, had)
        os.chdir(bounds.folder)
        os.environ.update(HOME=bounds.folder, TMPDIR=bounds.folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        live(missing)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Supervisor:
    """One worker, from its fork to its end."""

    def __init__(self, worker: int, output: int, run: socket.socket, bounds: Bounds, imported_bytes: int) -> None:
        self._worker = worker
        self._bounds = bounds
        self._imported_bytes = imported_bytes
        self._next_sum_s = time.monotonic() + MEMORY_S
        self._holds_too_much = False
        self._process = os.pidfd_open(worker)
        self._output = output
        self._run = run
        self._kept = b""
        os.set_blocking(output, False)

    def stay(self) -> None:
        """Until the worker and all that it started have ended; then report."""
        poll = select.poll()
        for each in (self._process, self._output, self._run.fileno()):
            poll.register(each, select.POLLIN)
        while True:
            left_s = max(0.0, self._next_sum_s - time.monotonic())
            ready = {descriptor for descriptor, _ in poll.poll(math.ceil(1000 * left_s))}
            self._bound_memory()
            if self._output in ready and not self._read_output():
                poll.unregister(self._output)
            if self._process in ready:
                break
            if self._run.fileno() in ready and not self._obey():
                poll.unregister(self._run.fileno())
        _, status, usage = os.wait4(self._worker, 0)
        end_descendants()
        for _ in range(MAX_LEFT // PIECE):
            if not self._read_output():
                break
        self._report(status, usage.ru_utime + usage.ru_stime)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._worker, signal.SIGKILL)

    def _bound_memory(self) -> None:
        """Kill the worker if its processes hold more memory than they may, when the next sum is due."""
        if time.monotonic() < self._next_sum_s:
            return
        if holds_more(self._bounds.memory_mb * MEGABYTE, self._imported_bytes):
            self._holds_too_much = True
            self.kill()
        self._next_sum_s = time.monotonic() + MEMORY_S

    def _obey(self) -> bool:
        """Do what the run says. Returns whether it may say more."""
        try:
            word = self._run.recv(1)
        except OSError:
            word = b""
        if word == TERMINATE:
            os.kill(self._worker, signal.SIGTERM)
        else:
            self.kill()
        return bool(word)

    def _read_output(self) -> bool:
        """Keep the end of what there is to read. Returns whether more may come."""
        try:
            piece = os.read(self._output, PIECE)
        except BlockingIOError:
            return True
        self._kept = (self._kept + piece)[-MAX_OUTPUT:]
        return bool(piece)

    def _report(self, status: int, cpu_s: float) -> None:
        code = os.waitstatus_to_exitcode(status)
        ended = Ended(
            signal=max(-code, 0),
            exit_code=max(code, 0),
            cpu_s=cpu_s,
            limit=self._limit_reached(-code, cpu_s),
            output=self._kept.decode("utf-8", "replace"),
        )
        with contextlib.suppress(OSError):  # the run has ended
            self._run.sendall(frame(ended))

    def _limit_reached(self, by_signal: int, cpu_s: float) -> str:
        """In words; empty: none."""
        bounds = self._bounds
        if by_signal == signal.SIGKILL and self._holds_too_much:
            return f"{bounds.memory_mb} MB of memory of all its processes (env.isolation.memory_mb)"
        if by_signal in (signal.SIGKILL, signal.SIGXCPU) and cpu_s >= bounds.cpu_s - CPU_MARGIN_S:
            return f"{bounds.cpu_s} s of CPU time (env.isolation.cpu_s)"
        return ""


def end_descendants() -> None:
    """Kill what a worker left. In a process namespace that is nothing: the kernel ended it with the worker.

    Each generation comes to this process when its parent has ended, so that they are killed one after the other.
    """
    end_s = time.monotonic() + KILLING_S
    while time.monotonic() < end_s:
        for child in () if sees_only_worker() else children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        except ChildProcessError:
            return


# -- the processes of a worker and the memory that they hold -----------------------------------------------------------
# Pages that processes share count once, where the kernel tells: it hides that of processes that hide themselves, as an
# environment's and its forks do, from all but root. Their pages count for each of them, but for what they had when the
# environment's code was imported. Files in the worker's folder have a bound of their own, and aren't counted.


PROC = Path("/proc")
KILOBYTE = 1024
SIZE = re.compile(rb"^(RssAnon|VmRSS|VmSwap|Pss_Anon|SwapPss):\s+(\d+) kB$", re.MULTILINE)


def holds_more(limit_bytes: int, imported_bytes: int) -> bool:
    """Whether the worker that this process supervises holds more memory than it may.

    imported_bytes: what the environment's code took of it before.
    """
    worker = list_numbers(PROC) if sees_only_worker() else descendants(os.getpid())
    held = {process: own_bytes(process) for process in worker}
    if sum(held.values()) <= limit_bytes:
        return False  # what they share takes longer to find out
    return sum(measure_process(process, most, imported_bytes) for process, most in held.items()) > limit_bytes


def sees_only_worker() -> bool:
    """Whether /proc is the one that the worker has mounted: with all of its processes, by their numbers in there, and
    no other.
    """
    return not (PROC / "self").exists()


def measure_process(process: int, held_bytes: int, imported_bytes: int) -> int:
    """What a process holds, with its part of what it shares."""
    try:
        fields = read_sizes(PROC / str(process) / "smaps_rollup")
    except OSError:
        return max(0, held_bytes - imported_bytes)
    return min(held_bytes, fields.get("Pss_Anon", held_bytes) + fields.get("SwapPss", 0))


def own_bytes(process: int) -> int:
    """Memory that a process holds, shared or not, without pages of files. 0: it has ended."""
    try:
        fields = read_sizes(PROC / str(process) / "status")
    except OSError:
        return 0
    return fields.get("RssAnon", fields.get("VmRSS", 0)) + fields.get("VmSwap", 0)


def read_sizes(file: Path) -> dict[str, int]:
    """The sizes of a file of /proc by their names, in bytes. Raises OSError."""
    with file.open("rb", buffering=0) as opened:
        return {name.decode(): int(size) * KILOBYTE for name, size in SIZE.findall(opened.read())}


def list_numbers(folder: Path) -> list[int]:
    try:
        return [int(each.name) for each in folder.iterdir() if each.name.isdigit()]
    except OSError:
        return []


def descendants(process: int) -> list[int]:
    """All that a process and its threads started, and what those started."""
    found = [process]
    for each in found:
        found += children(each)
    return found[1:]


def children(process: int) -> list[int]:
    """Processes whose parent is this one."""
    folder = PROC / str(process) / "task"
    try:
        listed = [(folder / str(thread) / "children").read_text(encoding="ascii") for thread in list_numbers(folder)]
    except FileNotFoundError:  # a kernel without this file, or the process has ended
        return [each for each in list_numbers(PROC) if find_parent(PROC / str(each)) == process]
    except OSError:
        return []
    return [int(child) for child in " ".join(listed).split()]


def find_parent(process: Path) -> int:
    try:
        stat = (process / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended
        return 0
    return int(stat.rpartition(")")[2].split()[1])
