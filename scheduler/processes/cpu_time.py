"""CPU seconds of processes on this machine, by their ids. Reads the system's counters."""

import os
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

PARENT, USER, SYSTEM = 1, 11, 12  # of proc_pid_stat(5), counted after the name, which may contain anything


def cpu_seconds(process_ids: Collection[int]) -> float:
    """The CPU seconds of all their threads, without child processes. A process that is gone counts 0, and so does each
    on a system without counters.
    """
    return sum(map(_taken_s, process_ids))


def list_family(process_ids: Collection[int]) -> list[int]:
    """These processes and all their descendants that live now; none besides them on a system without counters."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*"):
        if counts := _counts(int(path.name)):
            children[int(counts[PARENT])].append(int(path.name))
    family = list(process_ids)
    for process_id in family:  # grows on the way
        family += (child for child in children[process_id] if child not in process_ids)
    return family


def _taken_s(process_id: int) -> float:
    counts = _counts(process_id)
    return (int(counts[USER]) + int(counts[SYSTEM])) / os.sysconf("SC_CLK_TCK") if counts else 0.0


def _counts(process_id: int) -> list[str]:
    try:
        line = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return line.rpartition(")")[2].split()
