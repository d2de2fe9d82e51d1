"""Estimators, losses and corrections on the tiny task: what each comes to within the same budget.

    python benchmarks/algorithms.py run runs/algorithms                     # every row and seed that isn't there yet
    python benchmarks/algorithms.py run runs/algorithms --rows grpo gspo --seeds 0
    python benchmarks/algorithms.py report runs/algorithms

Each run is a process of its own on one core, `launch.py +experiment=quickstart cluster=inprocess`, of STEPS steps; what
it came to is appended to results.jsonl. The report, benchmarks/algorithms.md, is made of those lines. Tunes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "algorithms.md"
SEEDS = (0, 1)
STEPS = 40
INTRODUCTION = f"""\
`python benchmarks/algorithms.py run runs/algorithms`, then `report`: the quickstart with one generative judge, {STEPS}
steps of 16 groups x 8, one process on one core. 256 held-out problems: a figure is good to 3 points, and two seeds are
two seeds. Nothing was tuned: lr is 3e-4 for all, and all else is what conf/algorithm says.

With one update a batch r = pi_theta / pi_old is 1, and the losses with a ratio are one and the same; so they are
compared at four updates. The judge's reward is one span: `process` and `process_grpo` are the same as `grpo` then.
""".splitlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    overrides: tuple[str, ...]


def of_files(*names: str, also: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """Rows that are files of conf/algorithm, or several joined by +."""
    return tuple(Row(name=name, overrides=(f"algorithm=[{name.replace('+', ',')}]", *also)) for name in names)


SEVERAL = ("algorithm.updates_per_batch=4",)
TABLES: dict[str, tuple[Row, ...]] = {
    "Estimators, as their files have them, one update a batch": of_files(
        "grpo", "dr_grpo", "rloo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline"
    ),
    "Losses, with GRPO's advantages, four updates a batch": tuple(
        Row(name=f"4 x {row.name}", overrides=row.overrides)
        for row in of_files("grpo", "dual_clip", "dapo", "gspo", "gspo_token", "cispo", also=SEVERAL)
    ),
    "The plain policy gradient, one update a batch": of_files("policy_gradient"),
    "Corrections, with GRPO, one update a batch, staleness 4": tuple(
        Row(name=f"stale: {row.name}", overrides=row.overrides)
        for row in of_files(
            "grpo", "ppo_sampler", "sequence_tis", "sequence_mis", "icepop", "grpo+geometric", "grpo+veto",
            "grpo+off_policy_mask", "decoupled_ppo", "decoupled_ppo_interpolated", also=("train.max_staleness=4",)
        )
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run. Accuracies are those of the hidden rule on held-out problems."""

    row: str
    seed: int
    before: float  # sampled at T = 1
    after: float
    after_greedy: float
    grm_score: float  # after, 1 to 10
    step_s: float  # median
    learner_s: float  # of a step, median
    steps: int
    dropped: dict[str, int]
    load: float  # of the machine, one minute's mean at the end


def run(row: Row, seed: int, folder: Path) -> Result:
    """Exits where the run fails: its own words are on the screen."""
    run_dir = folder / f"{row.name.replace(' ', '_').replace(':', '')}-{seed}"
    command = [
        sys.executable, "launch.py", "+experiment=quickstart", "cluster=inprocess", "tracking=none",
        "tracking.console=false", f"train.num_steps={STEPS}", f"seed={seed}", f"run_dir={run_dir}", *row.overrides,
    ]  # fmt: skip
    if subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode != 0:
        sys.exit(f"failed: {' '.join(command)}")
    return read_run(run_dir, row, seed)


def read_run(run_dir: Path, row: Row, seed: int) -> Result:
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [step for step in map(json.loads, lines) if "time/step_s" in step]
    first, last = summary["eval"]["initial"], summary["eval"]["final"]
    return Result(
        row=row.name,
        seed=seed,
        before=first["true_accuracy"],
        after=last["true_accuracy"],
        after_greedy=last["true_accuracy_greedy"],
        grm_score=last["grm_score"],
        step_s=statistics.median(step["time/step_s"] for step in steps),
        learner_s=statistics.median(step["time/learner_s"] for step in steps),
        steps=summary["steps"],
        dropped=summary["groups"]["dropped"],
        load=os.getloadavg()[0],
    )


def results_in(folder: Path) -> list[Result]:
    path = folder / "results.jsonl"
    if not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def run_missing(folder: Path, names: Sequence[str], seeds: Sequence[int]) -> None:
    rows = [row for table in TABLES.values() for row in table if not names or row.name in names]
    if unknown := set(names) - {row.name for row in rows}:
        sys.exit(f"no such rows: {', '.join(sorted(unknown))}")
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for row in rows:
            if (row.name, seed) in {(result.row, result.seed) for result in results_in(folder)}:
                continue
            result = run(row, seed, folder)
            with (folder / "results.jsonl").open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(result)) + "\n")


def table(rows: Sequence[Row], results: Sequence[Result]) -> list[str]:
    """A line per row: each seed's accuracy, and medians of what else there is. Rows without a run say so."""
    lines = [
        "| row | true accuracy at T = 1, before | after, by seed | greedy, after | GRM score | step, s | learner, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = sorted((result for result in results if result.row == row.name), key=lambda result: result.seed)
        if not found:
            lines.append(f"| {row.name} | not run | | | | | |")
            continue
        lines.append(
            f"| {row.name} | {joined(result.before for result in found)} | {joined(result.after for result in found)} "
            f"| {joined(result.after_greedy for result in found)} "
            f"| {statistics.fmean(result.grm_score for result in found):.2f} "
            f"| {statistics.median(result.step_s for result in found):.2f} "
            f"| {statistics.median(result.learner_s for result in found):.2f} |"
        )
    return lines


def joined(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def beside_trl(folder: Path) -> list[str]:
    """What losses_of_trl.py found, if it was run."""
    path = folder / "trl.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    return [
        f"## Losses beside TRL {found['trl']}'s",
        "",
        "`python benchmarks/losses_of_trl.py runs/algorithms`: the same log-probs through both, float64, 20 random",
        "batches of 8 samples. The largest difference of the loss, and of its gradient by a token's log-prob:",
        "",
        "| loss | difference |",
        "|---|---|",
        *(f"| {name} | {gap:.0e} |" for name, gap in found["largest_difference"].items()),
        "",
    ]


def report(results: Sequence[Result], trl: Sequence[str] = ()) -> list[str]:
    lines = ["# Algorithms", "", *INTRODUCTION, ""]
    if results:
        loads = [result.load for result in results]
        lines += [
            f"The machine did other work meanwhile (load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} "
            "cores): compare seconds with care.",
            "",
        ]
    for title, rows in TABLES.items():
        lines += [f"## {title}", "", *table(rows, results), ""]
    dropped = [f"{result.row} (seed {result.seed}): {result.dropped}" for result in results if result.dropped]
    if dropped:
        lines += ["Groups dropped, by cause: " + "; ".join(dropped) + ".", ""]
    return [*lines, *trl][:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("folder", type=Path, help="for the runs and results.jsonl; what is there isn't run again")
    parser.add_argument("--rows", nargs="*", default=[], help="of the tables, by name; all if none is named")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    args = parser.parse_args()
    folder = args.folder.resolve()
    if args.what == "run":
        run_missing(folder, args.rows, args.seeds)
    else:
        lines = report(results_in(folder), beside_trl(folder))
        REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
