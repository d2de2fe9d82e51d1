"""The processes of a worker and the memory that they hold, read by its supervisor.

Pages that processes share count once, where the kernel tells: it hides that of processes that hide themselves, as an
environment's and its forks do, from all but root. Their pages count for each of them, but for what they had when the
environment's code was imported. Files in the worker's folder have a bound of their own, and aren't counted.
"""

import os
import re
from pathlib import Path

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
