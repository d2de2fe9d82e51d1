"""The memory of each process of a run on this machine, sampled while a command runs. Linux.

    python benchmarks/process_memory.py python launch.py +experiment=quickstart tracking=none

Prints the peak of each process (PSS, its share of pages that several processes map) and of all of them together, and
how long the command took. Give a command of at least a few seconds: memory is read five times a second at most, and
no more often than takes a twentieth of a core.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from grmpipe.run.features.cpu_seconds import list_family  # noqa: E402

EVERY_S = 0.2
LEAST_REST = 19  # times what a reading took: one of gigabytes takes a tenth of a second, and holds the process up
LEAST = 30e6  # bytes of a process that is listed


def main(command: list[str]) -> int:
    started_s = time.monotonic()
    peaks: Counter[int] = Counter()
    names: dict[int, str] = {}
    most, moment = 0, dict[int, int]()
    with subprocess.Popen(command) as run:
        while run.poll() is None:
            began_s = time.monotonic()
            now = {pid: pss for pid in list_family([run.pid]) if (pss := pss_bytes(pid))}
            for pid, pss in now.items():
                names[pid] = name_process(pid) or names.get(pid, "")
                peaks[pid] = max(peaks[pid], pss)
            if sum(now.values()) > most:
                most, moment = sum(now.values()), now
            time.sleep(max(EVERY_S, LEAST_REST * (time.monotonic() - began_s)))
    for pid, peak in peaks.most_common():
        if peak >= LEAST:
            print(f"{peak / 1e9:6.2f} GB, {moment.get(pid, 0) / 1e9:5.2f} when all had most: {names[pid]}")
    print(f"{most / 1e9:6.2f} GB together, of {len(moment)} processes; {time.monotonic() - started_s:.0f} s")
    return run.returncode


def pss_bytes(pid: int) -> int:
    """The process's proportional share of memory; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def name_process(pid: int) -> str:
    """The beginning of its command line, which actors of Ray set to their class."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:60]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
