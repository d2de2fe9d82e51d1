"""Draws learning curves from run directories: true accuracy, and the GRM's score in training.

python benchmarks/plot_learning_curve.py runs/quickstart/a runs/quickstart/b --out docs/learning_curve.png
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from grmpipe.observe.journal import read_journal

Points = Mapping[int, float]  # step -> value


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """`metric` of metrics.jsonl, divided by `full_scale`. `faint`: noisy, so it is drawn lightly."""

    metric: str
    label: str
    color: str
    full_scale: float = 1.0
    faint: bool = False


CURVES = (
    Curve(metric="train/true_accuracy", label="true accuracy, training batch", color="#0b7285", faint=True),
    Curve(metric="train/grm_score", label="GRM score / 10, training batch", color="#e8590c", full_scale=10, faint=True),
    Curve(metric="eval/true_accuracy", label="true accuracy, held-out, T = 1", color="#0b7285"),
    Curve(metric="eval/true_accuracy_greedy", label="true accuracy, held-out, greedy", color="#66a80f"),
    Curve(metric="eval/grm_score", label="GRM score / 10, held-out", color="#e8590c", full_scale=10),
)


def points_of(run_dir: Path, curve: Curve) -> Points:
    """The steps that have this metric; a step without a number is left out."""
    records = read_journal(run_dir / "metrics.jsonl")
    found = ((record["step"], record.get(curve.metric)) for record in records)
    return {step: value / curve.full_scale for step, value in found if value is not None}


def mean_over_seeds(seeds: Sequence[Points]) -> Points:
    """The mean at steps that every seed has: a mean over changing sets of seeds would show jumps of no seed."""
    steps = sorted(set.intersection(*(set(seed) for seed in seeds))) if seeds else []
    return {step: sum(seed[step] for seed in seeds) / len(seeds) for step in steps}


def draw_curve(axes: Axes, curve: Curve, seeds: Sequence[Points]) -> None:
    """One thin line per seed, a thick one for their mean; for a faint curve only the mean."""
    seeds = [seed for seed in seeds if seed]
    steps, values = series(mean_over_seeds(seeds))
    if not steps:
        return
    if curve.faint:
        axes.plot(steps, values, color=curve.color, linewidth=1.0, alpha=0.3, label=curve.label)
        return
    for seed in seeds if len(seeds) > 1 else ():
        axes.plot(*series(seed), color=curve.color, linewidth=0.8, alpha=0.45)
    label = f"{curve.label}: {values[0]:.2f} → {values[-1]:.2f}"
    axes.plot(steps, values, color=curve.color, linewidth=2.4, marker="o", markersize=4, label=label)


def series(points: Points) -> tuple[list[int], list[float]]:
    steps = sorted(points)
    return steps, [points[step] for step in steps]


def draw(run_dirs: Sequence[Path], out: Path, title: str, *, score: bool = True) -> None:
    """score: whether the GRM's score is drawn too. Raises ValueError if no run has any of the metrics."""
    chosen = [curve for curve in CURVES if score or "accuracy" in curve.metric]
    curves = {curve: [points_of(run_dir, curve) for run_dir in run_dirs] for curve in chosen}
    if not any(seed for seeds in curves.values() for seed in seeds):
        raise ValueError(f"no metrics to draw in {', '.join(map(str, run_dirs))}; give directories of training runs")
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for curve, seeds in curves.items():
        draw_curve(axes, curve, seeds)
    dress(axes, title, len(run_dirs))
    axes.set_ylabel("share of problems solved; score / 10" if score else "share of problems solved")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=160)
    plt.close(figure)


def dress(axes: Axes, title: str, num_runs: int) -> None:
    seeds = "one run" if num_runs == 1 else f"thick: mean of {num_runs} runs; thin: each run"
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=22)
    axes.text(0, 1.03, f"{seeds}; faint: mean of training batches", transform=axes.transAxes, color="#666", fontsize=9)
    axes.set_xlabel("optimizer step")
    axes.set_ylim(0, 1)
    axes.margins(x=0.03)
    axes.grid(axis="y", color="#ddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=8.5, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", type=Path, help="one directory per seed")
    parser.add_argument("--out", type=Path, default=Path("docs/learning_curve.png"), help="a .png or .svg file")
    parser.add_argument("--title", default="A policy learns from a generative judge")
    parser.add_argument("--no-score", action="store_true", help="of runs without a GRM")
    args = parser.parse_args()
    try:
        draw(args.run_dirs, args.out, args.title, score=not args.no_score)
    except ValueError as error:
        parser.error(str(error))
    print(args.out)


if __name__ == "__main__":
    main()
