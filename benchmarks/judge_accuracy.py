"""The accuracy of the tiny judges on labelled work, over the number of judgements per vote.

    OMP_NUM_THREADS=1 python benchmarks/judge_accuracy.py runs/judge_accuracy [cluster=inprocess ...]

Runs task=evaluate for the good GRM, the weak one, and the weak one after training, with two votes each, into
runs/judge_accuracy/<judge>_<vote>, and before that the trainings, into runs/judge_accuracy/rft_grm and train_grm;
finished runs are reused. Writes benchmarks/judge_accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "judge_accuracy.md"
TRAININGS = ("rft_grm", "train_grm")  # conf/experiment/, both from the weak GRM
VOTES = ("mean", "median")
NUM_ITEMS = 128
KINDS = ("ranked", "scored")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table. `column`: of evaluation.json, by_k or with_meta_rm."""

    judge: str
    vote: str
    result: Mapping[str, Any]
    column: str = "by_k"


def launched(run_dir: Path, overrides: Sequence[str]) -> None:
    """Run launch.py. Exits if the run fails; its output is on the screen."""
    command = [sys.executable, "launch.py", *overrides, "tracking=none", f"run_dir={run_dir}"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        sys.exit(f"{' '.join(command)} failed")


def trained(folder: Path, experiment: str, overrides: Sequence[str]) -> Path:
    """A trained GRM, as grm.path takes it."""
    model = folder / experiment / "policy"
    if not (model / "config.json").exists():
        launched(folder / experiment, [f"+experiment={experiment}", "resume=auto", *overrides])
    return model


def measured(run_dir: Path, overrides: Sequence[str]) -> Mapping[str, Any]:
    """The evaluation.json of a run."""
    result = run_dir / "evaluation.json"
    if not result.exists():
        task = ["+experiment=evaluate_grm", "task=evaluate", f"evaluate.num_items={NUM_ITEMS}"]
        launched(run_dir, [*task, *overrides])
    return json.loads(result.read_text(encoding="utf-8"))


def rows(folder: Path, overrides: Sequence[str]) -> list[Row]:
    judges = {"grm": ["grm=tiny"], "weak_grm": ["grm=tiny_weak", "meta_rm=tiny"]}
    for experiment in TRAININGS:
        judges[f"weak_grm after {experiment}"] = [
            "grm=path", f"grm.path={trained(folder, experiment, overrides)}"
        ]  # fmt: skip
    found = []
    for judge, grm in judges.items():
        for vote in VOTES:
            run_dir = folder / f"{judge.replace(' ', '_')}_{vote}"
            result = measured(run_dir, [*grm, f"judge.vote={vote}", *overrides])
            found.append(Row(judge=judge, vote=vote, result=result))
        if "meta_rm=tiny" in grm:
            found.append(Row(judge=judge, vote="best half by the meta-RM", result=result, column="with_meta_rm"))
    return found


def of_kind(row: Row, kind: str, k: str) -> float:
    """The accuracy over all subsets of a kind, weighted by their sizes."""
    subsets = [subset for name, subset in row.result["subsets"].items() if name.startswith(f"{kind}/")]
    sizes = [subset["judged"]["num_items"] for subset in subsets]
    right = [subset[row.column][k]["accuracy"] * size for subset, size in zip(subsets, sizes, strict=True)]
    return sum(right) / sum(sizes)


def table(found: Sequence[Row], kind: str) -> Iterator[str]:
    ks = list(found[0].result["overall"]["by_k"])
    yield f"| judge, vote | {' | '.join(f'k = {k}' for k in ks)} |"
    yield f"|---|{'---|' * len(ks)}"
    for row in found:
        shares = " | ".join(f"{100 * of_kind(row, kind, k):.1f}" for k in ks)
        yield f"| {row.judge}, {row.vote} | {shares} |"


def report(found: Sequence[Row]) -> list[str]:
    first = found[0].result
    sizes = {
        kind: sum(s["judged"]["num_items"] for name, s in first["subsets"].items() if name.startswith(f"{kind}/"))
        for kind in KINDS
    }
    costs = ", ".join(f"{tokens:.0f} at k = {k}" for k, tokens in first["tokens_by_k"].items())
    return [
        "# Accuracy of the tiny judges over k",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/judge_accuracy.py runs/judge_accuracy cluster=inprocess`; labels by rule",
        f"(`tiny://judgements_held_out`): {sizes['ranked']} rankings, {sizes['scored']} single responses. Sampled",
        "once, at the largest k and T = 1; smaller votes are subsets of the same judgements. In percent. `weak_grm` is",
        "the judge of `+experiment=reward_hacking`, which padding can fool; `rft_grm` and `train_grm` train it on",
        "`tiny://judgements` (SPCT: rejective fine-tuning, reinforcement learning by rule), one seed each. The meta-RM",
        "is `tiny://meta_rm`, made for `weak_grm`.",
        "",
        "## The best of two to five responses, strictly above the others",
        "",
        *table(found, "ranked"),
        "",
        "## A single response: the score, rounded, is the label",
        "",
        *table(found, "scored"),
        "",
        "The mean of more judgements ranks better, and hits an exact label less often: one outlier shifts it.",
        "The median stays on a label, and ties more often. No vote corrects a bias that all judgements share.",
        "The trainings reward the side of the label (pass or not), not the exact score.",
        "",
        f"Tokens sampled per item (grm): {costs}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; finished ones there are used again")
    parser.add_argument("overrides", nargs="*", help="of all runs, such as cluster=inprocess")
    args = parser.parse_args()
    folder = args.folder.resolve()
    lines = report(rows(folder, args.overrides))
    REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
