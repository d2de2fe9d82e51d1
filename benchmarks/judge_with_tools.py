"""A judge with a calculator, compared with the same judge and training without it, on sums beyond what it can add.

    OMP_NUM_THREADS=1 python benchmarks/judge_with_tools.py runs/judge_with_tools [--seeds 0 1 2 3 4]

For each seed trains `tiny://grm_calculator` on labels with and without the calculator, then measures both by
`task=evaluate` on the same held-out labelled answers, in judging as any run does it; and the judge that both began
with. Finished runs are reused. Writes benchmarks/judge_with_tools.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "judge_with_tools.md"
NUM_ITEMS, BAR = 2048, 0.10
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # 97.5 % points by degrees of freedom
QUIET = ("cluster=inprocess", "tracking=none", "tracking.console=false")
UNWATCHED = ("evaluate.every=1000", "evaluate.greedy=false", "data.num_eval_prompts=64", "judge_monitor.every=0")
ALONE = ("env=single_turn", "env.functions=''", "env.max_observation_chars=8000", "rollout.max_turns=1")
TOOLS = (
    "judge.tools.functions=grmpipe.tiny.tools", "judge.tools.max_calls=2", "judge.tools.max_result_chars=8"
)  # fmt: skip
ARMS = {"calculator": True, "without": False}

ABOUT = f"""`tiny://grm_calculator` judges answers to sums of 21 to 59: {NUM_ITEMS:,} held-out items, half of them
right; no pair of numbers is in both splits. It adds sums up to 20 by itself. It is **warm-started** to call: 2 % of its
examples are judgements with a call. Both arms are `+experiment=judge_with_tools`, the same steps, labels and seeds; one
has no tools. Each item is judged once, at T = 1; one without a verdict is judged once more, and counts as wrong if
that brings none either. Failed are judgements, and called are those with a call."""
COLD = """## Without a warm start

Five mixtures of examples without any judgement that calls (sums of 21 to 99, 300 to 400 steps; 256 held-out items, at
T = 1) left nothing for reinforcement learning to find, which rewards a call only if a verdict follows it; none was
trained.

| the calculator was shown for | judgements that called | of these with a verdict |
|---|---|---|
| questions | 0.4 % | 0 |
| questions, also after `Q:` and `A:`; and small sums judged with the calculator listed, without a call | 0 % | |
| questions, also after `Q:`, `A:` and a fenced `Answer:` | 93 % | 0 of 239 |
| questions, also after `Q:` and `A:`; sums to check | 82 % | 0 of 211 |
| questions; sums to check, small ones also without it | 0 % | |

Where it called it went on as after a question, with an answer in place of a verdict. Sums of 60 to 99 are left out:
their numbers are two tokens each, and after 300 steps of examples a warm-started judge copied both into 184 of 251
calls, and stayed at .5 over 20 steps of reinforcement learning."""


def launch(run_dir: Path, *overrides: str) -> Path:
    """Run it unless it has run. Exits if it fails."""
    if not (run_dir / "summary.json").exists():
        command = [sys.executable, "launch.py", *overrides, *QUIET, f"run_dir={run_dir}"]
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            sys.exit(f"{' '.join(command)} failed")
    return run_dir


def train(folder: Path, arm: str, seed: int) -> Path:
    more = () if ARMS[arm] else ALONE
    return launch(folder / f"{arm}_{seed}", "+experiment=judge_with_tools", f"seed={seed}", *UNWATCHED, *more)


def measure(folder: Path, name: str, model: str, seed: int, *, has_tools: bool) -> dict[str, Any]:
    """Accuracy and calls of a judge. Every item is judged once, at temperature 1."""
    run_dir = launch(
        folder / f"measured_{name}_{seed}", "+experiment=evaluate_grm", f"grm.path={model}", f"seed={seed}",
        "evaluate.path=tiny://sums_held_out", f"evaluate.num_items={NUM_ITEMS}", "evaluate.ks=[1]",
        "judge.max_new_tokens=72", "data.labels.rule=same_side", *(TOOLS if has_tools else ()),
    )  # fmt: skip
    found: dict[str, Any] = json.loads((run_dir / "evaluation.json").read_text(encoding="utf-8"))
    return found


def get_accuracy(found: dict[str, Any]) -> float:
    value: float = found["overall"]["judged"]["accuracy"]
    return value


def describe(found: dict[str, Any]) -> str:
    called = found["called_tools"] / found["num_judgements"]
    return f"{get_accuracy(found):.3f} | {called:.1%} | {sum(found['failed_judgements'].values())}"


def report(started: dict[str, Any], rows: Sequence[tuple[int, dict[str, Any], dict[str, Any]]], typed: str) -> str:
    gains = [get_accuracy(with_tool) - get_accuracy(alone) for _, with_tool, alone in rows]
    mean, num = statistics.fmean(gains), len(gains)
    half = STUDENT_T[num - 1] * statistics.stdev(gains) / math.sqrt(num) if num > 1 else math.nan
    lines = [
        "# A judge with a calculator", "", f"`{typed}`", "",
        ABOUT, "",
        "| judge | seed | accuracy | judgements that called | failed |", "|---|---|---|---|---|",
        f"| before training, with the calculator | 0 | {describe(started)} |",
    ]  # fmt: skip
    for seed, with_tool, alone in rows:
        lines += [
            f"| trained with it | {seed} | {describe(with_tool)} |",
            f"| trained without | {seed} | {describe(alone)} |",
        ]
    holds = (
        "holds" if mean - (half if num > 1 else 0) >= BAR else "holds in the mean" if mean >= BAR else "does not hold"
    )
    lines += [
        "",
        f"The calculator's gain over {num} paired seeds: {100 * mean:.1f} points (95 % interval by Student's t: "
        f"{100 * (mean - half):.1f} to {100 * (mean + half):.1f}). The bar of {100 * BAR:.0f} points {holds}.",
        "", COLD,
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    folder, rows = given.folder, []
    started = measure(folder, "start", "tiny://grm_calculator", 0, has_tools=True)
    for seed in given.seeds:
        found = {
            arm: measure(folder, arm, str(train(folder, arm, seed) / "policy"), seed, has_tools=has_tools)
            for arm, has_tools in ARMS.items()
        }
        rows.append((seed, found["calculator"], found["without"]))
        seeds = " ".join(map(str, given.seeds))
        typed = f"OMP_NUM_THREADS=1 python benchmarks/judge_with_tools.py {folder} --seeds {seeds}"
        REPORT.write_text(report(started, rows, typed), encoding="utf-8")


if __name__ == "__main__":
    main()
