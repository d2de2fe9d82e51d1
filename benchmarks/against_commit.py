"""Compares the quickstart of this checkout with that of an earlier commit, in alternating pairs of whole runs.

    python benchmarks/against_commit.py b0a4aaf runs/against_commit --pairs 10

Pair i runs both with seed i; the order within a pair alternates. Finished runs in the folder are reused. Both use this
interpreter's packages. Writes benchmarks/against_commit.md: medians, and the ratio pair by pair with an interval of its
median, of at least 95 % confidence with six pairs or more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import comb
from pathlib import Path

from quickstart import ROOT, busy_share_of_cores, machine, watch

from grmpipe.observe.journal import read_journal

REPORT = ROOT / "benchmarks" / "against_commit.md"
ROLES = {"driver": "driver", "policy": "policy", "grm": "judge", "learner": "learner"}  # as metrics name them -> shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of one run: times in seconds, and what its policy learned."""

    command_s: float
    ready_s: float
    ready_cpu_s: float  # CPU seconds of all processes until then
    step_mean_s: float
    step_median_s: float
    step_spread: float  # deviation over mean, without the first eighth of the steps and those after an evaluation
    step_cpu_s: Mapping[str, float]  # role -> CPU seconds of its processes per step
    greedy: float
    sampled: float
    busy_share: float  # of the cores, by other processes, just before it


def worktree_of(commit: str, folder: Path) -> Path:
    """A checkout of the commit, made once."""
    checkout = folder / f"checkout_{commit}"
    if not checkout.exists():
        command = ["git", "worktree", "add", "--quiet", "--detach", str(checkout), commit]
        subprocess.run(command, cwd=ROOT, check=True)
    return checkout


def run_once(checkout: Path, run_dir: Path, seed: int, overrides: Sequence[str]) -> Measured:
    """Run the quickstart of a checkout, unless a finished run is there. Exits if it fails."""
    notes = run_dir.with_suffix(".process.json")
    if not notes.exists():
        busy_share = busy_share_of_cores()
        command = [
            sys.executable,
            "launch.py",
            "+experiment=quickstart",
            *overrides,
            f"seed={seed}",
            f"run_dir={run_dir}",
        ]
        env = os.environ | {"PYTHONPATH": str(checkout), "WANDB_MODE": "offline"}
        watched = watch(command, checkout, env)
        times = {
            "command_s": watched.ended_s,
            "ready_s": watched.ready_s,
            "ready_cpu_s": sum(watched.ready_cpu_s.values()),
            "busy_share": busy_share,
        }
        notes.write_text(json.dumps(times), encoding="utf-8")
    return read_run(run_dir, json.loads(notes.read_text(encoding="utf-8")))


def read_run(run_dir: Path, times: dict[str, float]) -> Measured:
    steps = [record for record in read_journal(run_dir / "metrics.jsonl") if "time/step_s" in record]
    even = [
        after
        for before, after in pairwise(steps[len(steps) // 8 :])
        if not any(key.startswith("eval/") for key in before)
    ]
    final = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["eval"]["final"]
    return Measured(
        **times,
        step_mean_s=statistics.fmean(step["time/step_s"] for step in steps),
        step_median_s=statistics.median(step["time/step_s"] for step in steps),
        step_spread=spread([step["time/step_s"] for step in even]),
        step_cpu_s={role: statistics.fmean(step.get(f"{role}/cpu_s", 0.0) for step in steps) for role in ROLES},
        greedy=final["true_accuracy_greedy"],
        sampled=final["true_accuracy"],
    )


def spread(times_s: Sequence[float]) -> float:
    return statistics.pstdev(times_s) / statistics.fmean(times_s)


def cpu_of(run: Measured, role: str) -> float:
    return run.step_cpu_s[role]


ROWS: tuple[tuple[str, Callable[[Measured], float]], ...] = (
    ("command to exit, s", lambda run: run.command_s),
    ("command to ready, s", lambda run: run.ready_s),
    ("CPU seconds until ready, all processes", lambda run: run.ready_cpu_s),
    ("one step (mean), s", lambda run: run.step_mean_s),
    ("one step (median), s", lambda run: run.step_median_s),
    ("a step's standard deviation over its mean", lambda run: run.step_spread),
    ("CPU seconds of a step", lambda run: sum(run.step_cpu_s.values())),
    *((f"of it: {shown}", partial(cpu_of, role=role)) for role, shown in ROLES.items()),
    ("true accuracy, greedy, after", lambda run: run.greedy),
    ("true accuracy at T = 1, after", lambda run: run.sampled),
)


def interval_of(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Lowest, highest and confidence of an interval of the ratios' median, by order statistics, without an assumption
    on their distribution. Leaves out as many extremes as 95 % allows.
    """
    ordered, n = sorted(ratios), len(ratios)
    left_out, confidence = 0, 1 - 2 / 2**n
    while (tighter := confidence - 2 * comb(n, left_out + 1) / 2**n) >= 0.95:
        left_out, confidence = left_out + 1, tighter
    return ordered[left_out], ordered[n - 1 - left_out], confidence


def report(arguments: Sequence[str], commit: str, pairs: Sequence[tuple[Measured, Measured]]) -> list[str]:
    """`arguments`: those of the command. `pairs`: this checkout's run, then the commit's."""
    lines = [
        f"# The quickstart compared with commit {commit}",
        "",
        f"`python benchmarks/against_commit.py {' '.join(arguments)}`: {machine()}.",
        f"Other work on the cores before a run: at most {max(run.busy_share for pair in pairs for run in pair):.0%}.",
        "",
        f"| | now (median) | {commit} (median) | now / {commit}: median of pairs | interval |",
        "|---|---|---|---|---|",
    ]
    for label, value in ROWS:
        now, then = ([value(pair[side]) for pair in pairs] for side in (0, 1))
        ratios = [a / b for a, b in zip(now, then, strict=True)]
        low, high, _ = interval_of(ratios)
        medians = " | ".join(f"{statistics.median(values):.3f}" for values in (now, then))
        lines.append(f"| {label} | {medians} | {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} |")
    confidence = interval_of([1.0] * len(pairs))[2]
    return [*lines, "", f"The interval contains the median of the ratio with probability {confidence:.1%}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="to be compared with this checkout")
    parser.add_argument("folder", type=Path, help="for the runs; finished ones there are used again")
    parser.add_argument("overrides", nargs="*", help="of both, such as cluster=inprocess")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="of each run; without it, as many as the quickstart has")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    then = worktree_of(args.commit, folder)
    overrides = [*args.overrides, *([f"train.num_steps={args.steps}"] if args.steps else [])]
    pairs = []
    for seed in range(args.pairs):
        sides = {"now": ROOT, "then": then}
        order = list(sides) if seed % 2 == 0 else list(reversed(sides))
        measured = {side: run_once(sides[side], folder / f"{side}_{seed}", seed, overrides) for side in order}
        pairs.append((measured["now"], measured["then"]))
        print(f"pair {seed}: {measured['now'].step_mean_s:.3f} s per step, {measured['then'].step_mean_s:.3f} s then")
        lines = report(sys.argv[1:], args.commit, pairs)
        REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
