"""What train.deterministic costs, and how much two runs differ without it: the quickstart in one process.

    python benchmarks/deterministic.py runs/deterministic

For staleness 0 and 1: two runs without the key and two with it, alternating, of 15 steps (`--steps`). Finished runs in
the folder are used again. Writes benchmarks/deterministic.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quickstart import ROOT, machine
from same_run import Difference, difference, read_run

from grmpipe.observe.journal import read_journal

REPORT = ROOT / "benchmarks" / "deterministic.md"
MODES = ("false", "true")  # of train.deterministic
NUM_RUNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one run, in seconds."""

    cpu_s: float  # of the whole command
    step_s: float  # mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Two runs of one configuration."""

    max_staleness: int
    mode: str
    costs: tuple[Cost, ...]
    difference: Difference


def run_once(run_dir: Path, max_staleness: int, mode: str, steps: int) -> Cost:
    """Unless a finished run is there. Exits where it fails."""
    notes = run_dir.with_suffix(".process.json")
    if not notes.exists():
        command = [
            sys.executable, "launch.py", "+experiment=quickstart", "cluster=inprocess", "tracking=none",
            "judge_monitor.every=0", f"train.num_steps={steps}", f"train.max_staleness={max_staleness}",
            f"train.deterministic={mode}", f"run_dir={run_dir}",
        ]  # fmt: skip
        before_s = cpu_of_children()
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with code {done.returncode}")
        notes.write_text(json.dumps({"cpu_s": cpu_of_children() - before_s}), encoding="utf-8")
    steps_s = [line["time/step_s"] for line in read_journal(run_dir / "metrics.jsonl") if "time/step_s" in line]
    return Cost(**json.loads(notes.read_text(encoding="utf-8")), step_s=statistics.fmean(steps_s))


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(folder: Path, max_staleness: int, steps: int) -> list[Row]:
    def place(mode: str, number: int) -> Path:
        return folder / f"staleness_{max_staleness}_{mode}_{number}"

    costs: dict[str, list[Cost]] = {mode: [] for mode in MODES}
    for number in range(NUM_RUNS):
        for mode in MODES:
            costs[mode].append(run_once(place(mode, number), max_staleness, mode, steps))
    return [
        Row(
            max_staleness=max_staleness,
            mode=mode,
            costs=tuple(costs[mode]),
            difference=difference(*(read_run(place(mode, number)) for number in range(NUM_RUNS))),
        )
        for mode in MODES
    ]


def report(rows: list[Row], steps: int) -> list[str]:
    lines = [
        "# train.deterministic: its cost, and two runs with and without it",
        "",
        f"`python benchmarks/deterministic.py runs/deterministic --steps {steps}`: {machine()}. The quickstart in one",
        f"process, {steps} steps, seed 0, two runs of each configuration.",
        "",
        "| `train.max_staleness` | `train.deterministic` | CPU seconds of the command | mean step, s | "
        "rollouts with other tokens | log-probs, nats | weights at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cpu, step = (", ".join(f"{value:.{digits}f}" for value in values) for values, digits in (
            ([cost.cpu_s for cost in row.costs], 1), ([cost.step_s for cost in row.costs], 2),
        ))  # fmt: skip
        found = row.difference
        lines.append(
            f"| {row.max_staleness} | {row.mode} | {cpu} | {step} | {found.num_other_tokens} of {found.num_rollouts} | "
            f"{found.logprobs:.1e} | {found.weights:.1e} |"
        )
    return [
        *lines,
        "",
        "Log-probs (of rollouts with the same tokens) and weights: the largest difference of the two runs.",
        "Mean steps are by the clock, with other work on the cores: compare CPU seconds.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; finished ones there are used again")
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for max_staleness in (0, 1) for row in measured(folder, max_staleness, args.steps)]
    lines = report(rows, args.steps)
    REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
