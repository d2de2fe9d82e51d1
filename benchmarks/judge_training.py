"""The effect of training the judge: on labelled work, and next to a policy that would hack it if it were frozen.

    python benchmarks/judge_training.py runs/judge_training [--seeds 0 1 2]

Runs `rft_grm`, `train_grm`, one after the other, `reward_hacking` (a frozen judge), `cotrain` (the same judge, in
training), and that again with a third of its warm-up, for every seed, into runs/judge_training/<name>_<seed>. Finished
runs are reused, interrupted ones continued. Writes benchmarks/judge_training.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grmpipe.observe.journal import read_journal

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "judge_training.md"
# name -> overrides; {folder} and {seed} are filled in
VARIANTS = {
    "rft_grm": ["+experiment=rft_grm"],
    "train_grm": ["+experiment=train_grm"],
    "rft_grm, train_grm": ["+experiment=train_grm", "grm.path={folder}/rft_grm_{seed}/policy"],
    "reward_hacking": ["+experiment=reward_hacking"],
    "cotrain": ["+experiment=cotrain"],
    "cotrain_soon": ["+experiment=cotrain", "grm.train.warmup_steps=20", "grm.train.dynamic_sampling_batches=0"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run, from its files."""

    seed: int
    summary: Mapping[str, Any]
    looks: Sequence[Mapping[str, float]]  # lines of metrics.jsonl with an evaluation on held-out problems
    steps: Sequence[Mapping[str, float]]

    def at(self, step: int, metric: str) -> float | None:
        """The value of the evaluation after this step. None if there was none."""
        found = [look[metric] for look in self.looks if look["step"] == step and metric in look]
        return found[-1] if found else None


def run(folder: Path, name: str, seed: int, overrides: Sequence[str]) -> Run:
    """Run it, unless it is complete. Exits if it fails; its output is on the screen."""
    run_dir = folder / f"{name.replace(', ', '_')}_{seed}"
    typed = [override.format(folder=folder, seed=seed) for override in VARIANTS[name]]
    command = [sys.executable, "launch.py", *typed, f"seed={seed}", f"run_dir={run_dir}"]
    if subprocess.run([*command, "resume=auto", *overrides], cwd=ROOT, check=False).returncode != 0:
        sys.exit(f"{' '.join(command)} failed")
    return read(run_dir, seed)


def read(run_dir: Path, seed: int) -> Run:
    lines = list(read_journal(run_dir / "metrics.jsonl"))
    return Run(
        seed=seed,
        summary=json.loads((run_dir / "summary.json").read_text(encoding="utf-8")),
        looks=[line for line in lines if "eval/true_accuracy" in line],
        steps=[line for line in lines if "time/step_s" in line],
    )


# -- tables --------------------------------------------------------------------------------------------------------


def labelled(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Agreement with held-out labels before and after, one row per recipe and seed."""
    lines = ["| recipe | seed | steps | T = 1, before | after | greedy, before | after |", "|---" * 7 + "|"]
    for experiment in ("rft_grm", "train_grm", "rft_grm, train_grm"):
        for one in runs[experiment]:
            before, after = one.summary["eval"]["initial"], one.summary["eval"]["final"]
            cells = [
                f"{when[name]:.3f}" for name in ("true_accuracy", "true_accuracy_greedy") for when in (before, after)
            ]
            lines.append(f"| {experiment} | {one.seed} | {one.summary['steps']} | {' | '.join(cells)} |")
    return lines


def beside(frozen: Sequence[Run], learning: Sequence[Run], metric: str, form: str) -> list[str]:
    """A metric over the steps: seeds of the frozen judge next to the same seeds of the trained one."""
    steps = sorted({int(look["step"]) for one in (*frozen, *learning) for look in one.looks})
    names = [f"frozen, {one.seed}" for one in frozen] + [f"in training, {one.seed}" for one in learning]
    lines = [f"| step | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for step in steps:
        values = [one.at(step, metric) for one in (*frozen, *learning)]
        cells = ["" if value is None else format(value, form) for value in values]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return lines


def cost(frozen: Sequence[Run], learning: Sequence[Run]) -> str:
    def step_s(runs: Sequence[Run]) -> float:
        return statistics.median(step["time/step_s"] for one in runs for step in one.steps)

    voided = sum(one.summary["judging"]["voided_verdicts"] for one in learning)
    judged = sum(one.summary["judging"]["counted"] for one in learning)
    return (
        f"A step of the policy took {step_s(learning):.2f} s with a GRM in training, {step_s(frozen):.2f} s with a "
        f"frozen one (medians; both on the same cores). Judged again after a push: {voided} of {judged} verdicts."
    )


def finals(runs: Sequence[Run]) -> str:
    return ", ".join(f"{one.summary['eval']['final']['true_accuracy']:.2f}" for one in runs)


def report(runs: Mapping[str, Sequence[Run]], overrides: Sequence[str]) -> list[str]:
    frozen, learning = runs["reward_hacking"], runs["cotrain"]
    seeds = ", ".join(str(one.seed) for one in learning)
    typed = " ".join(["python benchmarks/judge_training.py runs/judge_training", *overrides])
    return [
        "# Training the judge",
        "",
        f"`{typed}`, seeds {seeds}.",
        "Defaults of the experiments; the judge is `tiny://weak_grm`, partly trained, and fooled by answers that are",
        "longer than needed.",
        "",
        "## Training on labelled judgements",
        "",
        "Share of held-out judgements that agree with their label (a right answer is passed, and no other).",
        "`rft_grm` is rejective fine-tuning, `train_grm` reinforcement learning by rule, both from the weak judge;",
        "in the last rows the second continues from the result of the first.",
        "",
        *labelled(runs),
        "",
        "## During policy training: frozen and in training",
        "",
        "The same policy, prompts and seeds. True accuracy of held-out answers by a rule that the policy never learns",
        f"from, at T = 1. It ends at {finals(learning)} with a judge in training, and at",
        f"{finals(frozen)} with a frozen one.",
        "",
        *beside(frozen, learning, "eval/true_accuracy", ".2f"),
        "",
        "Greedy, the same:",
        "",
        *beside(frozen, learning, "eval/true_accuracy_greedy", ".2f"),
        "",
        "The judge's mean score of them (1 to 10):",
        "",
        *beside(frozen, learning, "eval/grm_score", ".1f"),
        "",
        "The share of answers that a judge in training classifies correctly (step 0: before its warm-up):",
        "",
        *beside([], learning, "eval/grm_accuracy", ".2f"),
        "",
        cost(frozen, learning),
        "",
        "### Shorter warm-up",
        "",
        "With 20 steps of warm-up instead of 60, and without replacing judging tasks without signal (true accuracy):",
        "",
        *beside([], runs["cotrain_soon"], "eval/true_accuracy", ".2f"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; finished ones there are used again")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="of all runs, such as cluster=inprocess")
    args = parser.parse_args()
    folder = args.folder.resolve()
    runs = {name: [run(folder, name, seed, args.overrides) for seed in args.seeds] for name in VARIANTS}
    lines = report(runs, args.overrides)
    REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
