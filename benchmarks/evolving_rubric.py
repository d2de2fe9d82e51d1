"""Whether a rubric that evolves ends a trick that the fixed one misses.

    OMP_NUM_THREADS=1 python benchmarks/evolving_rubric.py runs/evolving_rubric [--seeds 0 1 2 3 4]

For each seed `+experiment=evolving_rubric` with its fixed rubric, with criteria written in the run, and with the fixed
one under dropout, into runs/evolving_rubric/<arm>_<seed>; finished runs are used again. Writes
benchmarks/evolving_rubric.md from all runs in the folder.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grmpipe.observe.journal import read_journal

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "evolving_rubric.md"
FIXED = "judge.rubric.evolve.every_steps=1000"  # the writer is there, and never asked
ARMS: Mapping[str, tuple[str, ...]] = {
    "evolving": (),
    "fixed": (FIXED,),
    "dropout": (FIXED, "judge.rubric.dropout=0.3"),
}
USUAL = ("cluster=inprocess", "tracking=none", "judge_monitor.every=0", "evaluate.every=5", "evaluate.greedy=false")
WINDOW = 3  # evaluations in a mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run. accuracy: step -> true accuracy of held-out answers."""

    seed: int
    accuracy: Mapping[int, float]
    entered: Sequence[Mapping[str, Any]]  # candidates that became part of the rubric

    @property
    def means(self) -> list[float]:
        """Means of consecutive evaluations."""
        values = list(self.accuracy.values())
        return [statistics.fmean(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]

    @property
    def fall(self) -> float:
        """From the best mean of three evaluations to the last one."""
        return max(self.means) - self.means[-1]


def run(folder: Path, arm: str, seed: int, overrides: Sequence[str]) -> None:
    """Run it, unless it is complete. Exits if it fails; its output is on the screen."""
    run_dir = folder / f"{arm}_{seed}"
    if not (run_dir / "summary.json").exists():
        typed = ["+experiment=evolving_rubric", *ARMS[arm], *USUAL, *overrides, f"seed={seed}", f"run_dir={run_dir}"]
        command = [sys.executable, "launch.py", *typed, "resume=auto"]
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            sys.exit(f"{' '.join(command)} failed")


def read(run_dir: Path) -> Run:
    lines = [line for line in read_journal(run_dir / "metrics.jsonl") if "eval/true_accuracy" in line]
    candidates = run_dir / "rubric_candidates.jsonl"
    tried = read_journal(candidates) if candidates.exists() else ()
    return Run(
        seed=int(run_dir.name.rpartition("_")[2]),
        accuracy={int(line["step"]): line["eval/true_accuracy"] for line in lines},
        entered=[one for one in tried if one["outcome"] == "entered"],
    )


def report(arms: Mapping[str, Sequence[Run]], typed: str) -> list[str]:
    lines = [
        "# Rubrics that evolve",
        "",
        f"`{typed}`",
        "",
        "`+experiment=evolving_rubric`: about 8 % of the policy's answers open with each of two phrases, and are then",
        "mostly wrong. Its judge, `tiny://grm_criteria`, passes whatever opens with a phrase, unless a criterion names",
        "it. The fixed rubric names one of the two. Neither the judge nor `tiny://rubric_writer` was shown them in its",
        "training. True accuracy of held-out answers by a rule, at T = 1; best and last: means of three evaluations.",
        "A run that still rises at its last step has a fall of 0.",
        "",
        "| rubric | seed | first | best | last | fall |",
        "|---|---|---|---|---|---|",
    ]
    for arm, runs in arms.items():
        for one in runs:
            first = next(iter(one.accuracy.values()))
            lines.append(
                f"| {arm} | {one.seed} | {first:.3f} | {max(one.means):.3f} | {one.means[-1]:.3f} | {one.fall:.3f} |"
            )
        if len(runs) > 1:
            falls = [one.fall for one in runs]
            last = statistics.fmean(one.means[-1] for one in runs)
            mean, error = statistics.fmean(falls), statistics.stdev(falls) / len(falls) ** 0.5
            spread = f"{mean:.3f} (standard error {error:.3f})"
            lines.append(f"| **{arm}** | mean of {len(runs)} | | | {last:.3f} | {spread} |")
    steps = sorted({step for runs in arms.values() for one in runs for step in one.accuracy})
    names = [f"{arm}, {one.seed}" for arm, runs in arms.items() for one in runs]
    lines += ["", f"| step | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for step in steps:
        values = [one.accuracy.get(step) for runs in arms.values() for one in runs]
        lines.append(f"| {step} | {' | '.join('' if one is None else f'{one:.2f}' for one in values)} |")
    lines += ["", "Criteria that entered, by the pairs of their trials:", ""]
    lines += ["| seed | step | criterion | weight | for : against |", "|---|---|---|---|---|"]
    for one in arms.get("evolving", ()):
        for tried in one.entered:
            shown = f"{tried['text']} | {tried['weight']:g} | {tried['wins']} : {tried['losses']}"
            lines.append(f"| {one.seed} | {tried['step']} | {shown} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; finished ones there are used again")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("overrides", nargs="*", help="of all runs, such as train.num_steps=40")
    args = parser.parse_args()
    folder = args.folder.resolve()
    for seed in args.seeds:
        for arm in args.arms:
            run(folder, arm, seed, args.overrides)
    done = {arm: sorted(path.parent for path in folder.glob(f"{arm}_*/summary.json")) for arm in ARMS}
    typed = " ".join(["python benchmarks/evolving_rubric.py runs/evolving_rubric", *args.overrides])
    lines = report({arm: [read(path) for path in found] for arm, found in done.items() if found}, typed)
    REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
