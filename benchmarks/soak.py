"""Memory, step time and files of a long run: whether any of them grows with the steps.

    python benchmarks/soak.py 300 +experiment=tools
    python benchmarks/soak.py 1000 +experiment=quickstart

The memory of each process (anonymous pages) is read every two seconds: its median over the steps from 20 to 25 % of
the run, and over the last 5 %. Step times and bytes per step are means over the second and over the last fifth: steps
take turns at being long and short. Prints a table for benchmarks/soak.md, and removes the run, unless it failed. Exit
code 1 if a process grows by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median

from faults.process_faults import MARK, find_marked

ROOT = Path(__file__).parents[1]
EVERY_S = 2.0
LIMIT = 1.05
EARLY_AND_LATE = ((0.2, 0.25), (0.95, 1.0))  # shares of the run
FIFTHS = ((0.2, 0.4), (0.8, 1.0))
Samples = dict[int, list[tuple[int, int]]]  # process -> (step, MB)


def main(num_steps: int, overrides: Sequence[str]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    run_dir = folder / "run"
    command = [
        sys.executable,
        str(ROOT / "launch.py"),
        *overrides,
        f"train.num_steps={num_steps}",
        f"run_dir={run_dir}",
    ]
    environment = {**os.environ, "WANDB_MODE": "disabled", MARK: str(folder)}
    process = subprocess.Popen(command, env=environment, cwd=folder)
    samples: Samples = defaultdict(list)
    sizes = list[tuple[int, int]]()
    while process.poll() is None:
        time.sleep(EVERY_S)
        step = count_steps(run_dir)
        sizes.append((step, sum(path.stat().st_size for path in run_dir.glob("*.jsonl"))))
        for number, memory_mb in read_memory(str(folder)):
            samples[number].append((step, memory_mb))
    if process.returncode:
        return process.returncode
    names = {process.pid: "driver"} | name_processes(run_dir)
    print(f"| {' '.join(overrides)}, {num_steps} steps | early | late | ratio |\n|---|---|---|---|")
    grown = [
        compare(f"{name}, MB", *(median(within(samples[number], num_steps, *part)) for part in EARLY_AND_LATE))
        for number, name in names.items()
    ]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = [(line["step"], line["time/step_s"]) for line in lines if "time/step_s" in line]
    compare("a step, s", *(mean(within(times, num_steps, *part)) for part in FIFTHS))
    rates = list(rates_of(sizes))
    compare("journals, bytes a step", *(mean(within(rates, num_steps, *part)) for part in FIFTHS))
    shutil.rmtree(folder)
    return int(max(grown) > LIMIT)


def count_steps(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def read_memory(mark: str) -> Iterator[tuple[int, int]]:
    """Process and MB, of all with the mark in their environment."""
    for process, _ in find_marked(mark):
        with suppress(OSError):  # it has ended
            sizes = Path(f"/proc/{process}/smaps_rollup").read_text()
            found = re.search(r"^Anonymous:\s+(\d+) kB", sizes, re.MULTILINE)
            assert found is not None
            yield process, int(found[1]) // 1024


def name_processes(run_dir: Path) -> dict[int, str]:
    found = re.findall(r"(\S+) runs in process (\d+)", (run_dir / "run.log").read_text())
    return {int(number): name for name, number in found}


def within(points: Sequence[tuple[int, float]], num_steps: int, begin: float, end: float) -> list[float]:
    """The values between two shares of the run."""
    return [value for step, value in points if begin * num_steps <= step <= end * num_steps]


def rates_of(sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, float]]:
    """Bytes a step, over ten steps each, by the last of them."""
    first, before = sizes[0]
    for step, size in sizes[1:]:
        if step >= first + 10:
            yield step, (size - before) / (step - first)
            first, before = step, size


def compare(name: str, early: float, late: float) -> float:
    print(f"| {name} | {early:,.4g} | {late:,.4g} | {late / early:.3f} |", flush=True)
    return late / early


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_steps", type=int)
    parser.add_argument("overrides", nargs="+")
    args = parser.parse_args()
    sys.exit(main(args.num_steps, args.overrides))
