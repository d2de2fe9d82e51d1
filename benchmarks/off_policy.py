"""Off-policy corrections: the naive loss and the corrected ones, on stale rollouts of quantized weights.

    python benchmarks/off_policy.py run runs/off_policy                        # every missing row and seed
    python benchmarks/off_policy.py run runs/off_policy --rows naive --seeds 0
    python benchmarks/off_policy.py report runs/off_policy                     # off_policy.md, docs/off_policy.png

Each run is its own process on one core, judged by the rule, so that only the sampler is noisy. The report is made from
the runs' files. Tunes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grmpipe.observe.journal import read_journal

ROOT = Path(__file__).parents[1]
REPORT, PICTURE = ROOT / "benchmarks" / "off_policy.md", ROOT / "docs" / "off_policy.png"
SEEDS = (0, 1, 2)
STEPS, LR, STALENESS = 40, 1e-3, 4
SMOOTHED_OVER = 5  # steps
COMMON = (
    "+experiment=quickstart", "cluster=inprocess", "judge=rule", "tracking=none", "tracking.console=false",
    "judge_monitor.every=0", "train.checkpoint_every=0", f"train.num_steps={STEPS}", f"train.lr={LR:g}",
    f"train.max_staleness={STALENESS}", "engine.embedded.quantize=int4", "sync.probe_tolerance=10",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    overrides: tuple[str, ...]
    color: str


ROWS = (
    Row(
        name="naive",
        overrides=("algorithm.correction=grmpipe.algorithm.corrections.apply_no_correction",),
        color="#c92a2a",
    ),
    Row(name="tis", overrides=("algorithm.correction=tis",), color="#0b7285"),
    Row(name="icepop", overrides=("algorithm=icepop",), color="#66a80f"),
    Row(name="decoupled", overrides=("algorithm=decoupled_ppo",), color="#5f3dc4"),
)


INTRODUCTION = (
    f"""
    `python benchmarks/off_policy.py run runs/off_policy`, then `report`: the quickstart's policy and prompts, judged
    by the rule; {STEPS} steps of 16 groups x 8, lr {LR:g}, {len(SEEDS)} seeds. All sample from weights that are
    rounded to 4 bits after each push (`engine.embedded.quantize=int4`), and train on samples up to {STALENESS} versions
    old; `naive` corrects for neither.
    """,
    """
    Accuracy is that of the rule: on 256 held-out problems (good to 3 points) at T = 1, and in the batches themselves.
    The mismatch is |log pi_old - log mu| per token, rounding and staleness together; the probe is the largest
    rounding error alone. The dip at the beginning of all curves comes from the order of the groups: the first batch
    consists of those that end first, the short ones, and the next ones of the rest.
    """,
)
NOTES = (
    """
    The naive loss ends below where it began, with every seed. TIS learns with every seed, from the same sampler and
    in the same number of steps. The two corrections that leave tokens out do less: IcePop (weights from 0.5 to 5)
    gains a little in two seeds of three, decoupled PPO (up to 5) in one; the reason wasn't examined. Three seeds
    separate naive and TIS, but not the other two.
    """,
    """
    The setting was chosen with one seed each, 30 steps: at lr 1e-3 the naive loss didn't improve (0.305 to 0.305)
    while TIS reached 0.391; at lr 3e-3 both collapsed (to 0.07 and 0.06). With int8 the mismatch of the first five
    steps was 0.02 nats at most, too little for a comparison. Nothing else was tried; no key of a correction was
    changed.
    """,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run. Accuracies are those of the rule."""

    before: float  # held-out, T = 1
    after: float
    after_greedy: float
    trained: tuple[float, ...]  # of the rollouts of each step
    mismatch: float  # |log pi_old - log mu| per token, nats: mean over all steps
    out_of_band: float  # share of tokens whose probability differs by more than a tenth
    probe_error: float  # nats, the largest of all pushes

    @property
    def trained_at_end(self) -> float:
        return statistics.fmean(self.trained[-10:])


def run_dir_of(row: Row, seed: int, folder: Path) -> Path:
    return folder / f"{row.name.replace(' ', '_')}-{seed}"


def run_missing(folder: Path, names: Sequence[str], seeds: Sequence[int]) -> None:
    """Run what is missing. Exits if a run fails; its output is on the screen."""
    if unknown := set(names) - {row.name for row in ROWS}:
        sys.exit(f"no such rows: {', '.join(sorted(unknown))}")
    for seed in seeds:
        for row in ROWS:
            run_dir = run_dir_of(row, seed, folder)
            if (names and row.name not in names) or (run_dir / "summary.json").exists():
                continue
            command = [sys.executable, "launch.py", *COMMON, f"seed={seed}", f"run_dir={run_dir}", *row.overrides]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0:
                sys.exit(f"failed: {' '.join(command)}")


def read_run(run_dir: Path) -> Result:
    looked = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["eval"]
    steps = [step for step in read_journal(run_dir / "metrics.jsonl") if "time/step_s" in step]
    return Result(
        before=looked["initial"]["true_accuracy"],
        after=looked["final"]["true_accuracy"],
        after_greedy=looked["final"]["true_accuracy_greedy"],
        trained=tuple(step["train/true_accuracy"] for step in steps),
        mismatch=statistics.fmean(step["mismatch/mean_nats"] for step in steps),
        out_of_band=statistics.fmean(step["mismatch/out_of_band_share"] for step in steps),
        probe_error=max(step["sync/probe_error_nats"] for step in steps),
    )


def results_of(row: Row, folder: Path) -> list[Result]:
    """The results of a row, by seed."""
    dirs = [run_dir_of(row, seed, folder) for seed in SEEDS]
    return [read_run(run_dir) for run_dir in dirs if (run_dir / "summary.json").exists()]


# -- report --------------------------------------------------------------------------------------------------------


def report(folder: Path) -> str:
    found = {row: results for row in ROWS if (results := results_of(row, folder))}
    columns = (
        "loss", "held-out before", "after, by seed", "mean", "greedy", "last 10 batches", "mismatch, nats",
        "beyond 10 %", "probe, nats",
    )  # fmt: skip
    lines = [
        "# Off-policy samplers",
        "",
        *paragraphs(INTRODUCTION),
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    lines += [line_of(row, results) for row, results in found.items()]
    return "\n".join([*lines, "", f"![curves](../docs/{PICTURE.name})", "", *paragraphs(NOTES)]).rstrip() + "\n"


def paragraphs(texts: Sequence[str]) -> list[str]:
    """The texts, each with an empty line after it."""
    return [line for text in texts for line in (*textwrap.wrap(" ".join(text.split()), 120), "")]


def line_of(row: Row, results: Sequence[Result]) -> str:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(result, name) for result in results)

    each = ", ".join(f"{result.after:.3f}" for result in results)
    return (
        f"| {row.name} | {mean('before'):.3f} | {each} | {mean('after'):.3f} | {mean('after_greedy'):.3f} "
        f"| {mean('trained_at_end'):.3f} | {mean('mismatch'):.3f} | {mean('out_of_band'):.1%} "
        f"| {max(result.probe_error for result in results):.2g} |"
    )


def draw(folder: Path, out: Path) -> None:
    """One thin line per seed, a thick one for their mean, smoothed."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    for row in ROWS:
        if curves := [smoothed(result.trained) for result in results_of(row, folder)]:
            for curve in curves:
                axes.plot(range(1, len(curve) + 1), curve, color=row.color, linewidth=0.7, alpha=0.35)
            means = [statistics.fmean(values) for values in zip(*curves, strict=False)]
            axes.plot(range(1, len(means) + 1), means, color=row.color, linewidth=2.2, label=row.name)
    axes.set(xlabel="step", ylabel="true accuracy of the batch", title=f"int4 sampler, staleness {STALENESS}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of a step and those before it."""
    windows = (values[max(0, end - SMOOTHED_OVER) : end] for end in range(1, len(values) + 1))
    return [statistics.fmean(window) for window in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    given = parser.parse_args()
    folder = given.folder.absolute()
    if given.what == "run":
        run_missing(folder, given.rows, given.seeds)
    else:
        REPORT.write_text(report(folder), encoding="utf-8")
        draw(folder, PICTURE)


if __name__ == "__main__":
    main()
