"""The effect of a meta-RM on votes over k judgements: `OMP_NUM_THREADS=1 python benchmarks/meta_rm.py runs/a ..`.

Reads runs of `+experiment=train_meta_rm` (judgements of held-out work, and the meta-RM), one per seed. The first k
judgements of each item vote: all with equal weight (mean), the half with the highest probabilities (best), or all
weighted by their probabilities (weighted). Writes benchmarks/meta_rm.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from grmpipe.evaluation.meta_rm_quality import measure
from grmpipe.judge.labelled_judgements import LabelledJudgement, read_examples
from grmpipe.judge.meta_rm import sigmoid
from grmpipe.types import Metrics
from models.engines.scorer import ScalarScorer, ScorerSpec

OUTPUT = Path(__file__).with_suffix(".md")
VOTES = ("vote_mean", "vote_best", "vote_weighted")


@dataclass(frozen=True)
class Measured:
    """One run's held-out items with votes over the first k judgements."""

    run_dir: Path
    num_items: int
    by_k: dict[int, Metrics]
    single: Metrics  # of all single judgements
    wall_s: float


def measure_run(run_dir: Path) -> Measured:
    held_out = [example for example in read_examples(run_dir / "judgements.jsonl") if example.split == "held_out"]
    scorer = ScalarScorer(ScorerSpec(path=str(run_dir / "meta_rm")))
    logits = scorer.scores([example.token_ids for example in held_out])
    probabilities = [sigmoid(logit) for logit in logits]
    place_in_item = places(held_out)
    by_k: dict[int, Metrics] = {}
    k = 1
    while k <= max(place_in_item) + 1:
        kept = [index for index, place in enumerate(place_in_item) if place < k]
        by_k[k] = measure([held_out[i] for i in kept], [probabilities[i] for i in kept], k_meta=0)
        k *= 2
    return Measured(
        run_dir=run_dir,
        num_items=len({example.item_id for example in held_out}),
        by_k=by_k,
        single=measure(held_out, probabilities, k_meta=0),
        wall_s=json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["wall_s"],
    )


def places(examples: Sequence[LabelledJudgement]) -> list[int]:
    """The index of each judgement among those of its item."""
    seen: dict[str, int] = {}
    found = []
    for example in examples:
        found.append(seen.get(example.item_id, 0))
        seen[example.item_id] = found[-1] + 1
    return found


def report(runs: Sequence[Measured], command: str) -> str:
    """A table over k; figures are means over the runs, with each run's in brackets."""
    lines = [
        "# Effect of a meta-RM on the vote",
        "",
        f"`{command}`: {len(runs)} runs of `+experiment=train_meta_rm`, one seed each; "
        f"{runs[0].num_items} held-out items (one item is {100 / runs[0].num_items:.1f} points).",
        "",
        "Share of items on which the vote over k judgements agrees with the label.",
        "",
        "| k | mean of all | best half | weighted |",
        "|---|---|---|---|",
    ]
    for k in runs[0].by_k:
        cells = [shown([run.by_k[k][vote] for run in runs]) for vote in VOTES]
        lines.append(f"| {k} | {' | '.join(cells)} |")
    lines += ["", "Of single judgements:", ""]
    for name, what in (
        ("base_rate", "are right"),
        ("accuracy", "are classified correctly by the meta-RM"),
        ("auc", "AUC"),
        ("brier", "Brier score"),
        ("calibration_error", "calibration error"),
    ):
        lines.append(f"- {what}: {shown([run.single[name] for run in runs])}")
    lines += [
        "",
        f"Sampling and training took {shown([run.wall_s for run in runs], 0)} s, with other load on the machine.",
    ]
    return "\n".join(lines) + "\n"


def shown(values: Sequence[float], digits: int = 3) -> str:
    each = ", ".join(f"{value:.{digits}f}" for value in values)
    return f"{fmean(values):.{digits}f} ({each})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="run_dir")
    runs = parser.parse_args().runs
    text = report([measure_run(run_dir) for run_dir in runs], "python benchmarks/meta_rm.py")
    OUTPUT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
