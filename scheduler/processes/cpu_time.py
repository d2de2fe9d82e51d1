"""CPU seconds that processes of this machine have taken, by their ids. Reads what the system counts; asks nobody."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

USER, SYSTEM = 11, 12  # of proc_pid_stat(5), counted behind the name, which may hold anything


def cpu_seconds(process_ids: Collection[int]) -> float:
    """Of all their threads, not of other processes that they started. A process that is gone counts nothing, nor does
    any where the system doesn't tell."""
    return sum(map(_taken_s, process_ids))


def _taken_s(process_id: int) -> float:
    try:
        line = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    counts = line.rpartition(")")[2].split()
    return (int(counts[USER]) + int(counts[SYSTEM])) / os.sysconf("SC_CLK_TCK")
