"""CPU seconds of processes on this machine, by their ids. Reads the system's counters."""

import os
from collections.abc import Collection
from pathlib import Path

USER, SYSTEM = 11, 12  # of proc_pid_stat(5), counted after the name, which may contain anything


def cpu_seconds(process_ids: Collection[int]) -> float:
    """The CPU seconds of all their threads, without child processes. A process that is gone counts 0, and so does each
    on a system without counters.
    """
    return sum(map(_taken_s, process_ids))


def _taken_s(process_id: int) -> float:
    try:
        line = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    counts = line.rpartition(")")[2].split()
    return (int(counts[USER]) + int(counts[SYSTEM])) / os.sysconf("SC_CLK_TCK")
