"""How right the tiny judges are about labelled work, over the number of judgements per vote.

    OMP_NUM_THREADS=1 python benchmarks/judge_accuracy.py runs/judge_accuracy [cluster=inprocess ...]

Runs task=evaluate for the good and the weak GRM, with two votes each, into runs/judge_accuracy/<grm>_<vote>; what is
there is used again. Writes benchmarks/judge_accuracy.md. Changes nothing that it measures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "judge_accuracy.md"
GRMS = {"grm": "tiny", "weak_grm": "tiny_weak"}  # as the tables call them -> conf/grm/
VOTES = ("mean", "median")
NUM_ITEMS = 128
KINDS = ("ranked", "scored")


def measured(folder: Path, grm: str, vote: str, overrides: Sequence[str]) -> Mapping[str, Any]:
    """evaluation.json. Exits where the run fails: its own words are on the screen."""
    run_dir = folder / f"{grm}_{vote}"
    command = [
        sys.executable, "launch.py", "+experiment=evaluate_grm", "task=evaluate", f"grm={GRMS[grm]}",
        f"judge.vote={vote}", f"evaluate.num_items={NUM_ITEMS}", "tracking=none", f"run_dir={run_dir}", *overrides,
    ]  # fmt: skip
    result = run_dir / "evaluation.json"
    if not result.exists() and subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        sys.exit(f"{' '.join(command)} failed")
    return json.loads(result.read_text(encoding="utf-8"))


def of_kind(result: Mapping[str, Any], kind: str, k: str) -> float:
    """Over all subsets of a kind, by their sizes."""
    subsets = [subset for name, subset in result["subsets"].items() if name.startswith(f"{kind}/")]
    sizes = [subset["judged"]["num_items"] for subset in subsets]
    right = [subset["by_k"][k]["accuracy"] * size for subset, size in zip(subsets, sizes, strict=True)]
    return sum(right) / sum(sizes)


def table(results: Mapping[tuple[str, str], Mapping[str, Any]], kind: str) -> Iterator[str]:
    ks = list(next(iter(results.values()))["overall"]["by_k"])
    yield f"| judge, vote | {' | '.join(f'k = {k}' for k in ks)} |"
    yield f"|---|{'---|' * len(ks)}"
    for (grm, vote), result in results.items():
        yield f"| {grm}, {vote} | {' | '.join(f'{100 * of_kind(result, kind, k):.1f}' for k in ks)} |"


def report(results: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    first = next(iter(results.values()))
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
        "the judge of `+experiment=reward_hacking`, which padding impresses.",
        "",
        "## The best of two to five responses, strictly above the others",
        "",
        *table(results, "ranked"),
        "",
        "## A single response: the score, rounded, is the label",
        "",
        *table(results, "scored"),
        "",
        "The mean of more judgements ranks better, and hits an exact label less often: one stray score pulls it off.",
        "The median keeps to a label, and ties more often. No vote mends a bias that all judgements share.",
        "",
        f"Tokens sampled per item (grm): {costs}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; finished ones there are used again")
    parser.add_argument("overrides", nargs="*", help="of all runs, such as cluster=inprocess")
    args = parser.parse_args()
    folder = args.folder.resolve()
    lines = report({(grm, vote): measured(folder, grm, vote, args.overrides) for grm in GRMS for vote in VOTES})
    REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
