"""`+experiment=smollm2` over three seeds, and with a reward for brevity alone: accuracy, seconds, memory.

    make smollm2
    python benchmarks/smollm2.py runs/smollm2_benchmark .smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Runs that are in the folder are used again. Writes benchmarks/smollm2.md and docs/smollm2.png.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from grmpipe.observe.journal import read_journal

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "smollm2.md"
PICTURE = ROOT / "docs" / "smollm2.png"
SEEDS = (0, 1, 2)
BREVITY = "smollm2.brief"  # this module's function: the run has this folder on PYTHONPATH
PAGE = """\
# A real small model: SmolLM2-135M-Instruct

`make smollm2` fetches its weights (a file quantized to Q4_1, from whose dequantized weights it is trained) and runs
`python launch.py +experiment=smollm2`. Measured on {cores} cores by `python benchmarks/smollm2.py
runs/smollm2_benchmark .smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`. The hub's weights were not run here.

174 questions that one word answers, and 128 held-out ones: capitals, opposites, plurals, languages, numbers in digits.
Nothing that is asked about or answered stands in both. The reward is 1 for the reference alone, half with one more
word, a third with two, 0 without it (`right_and_brief` in `grmpipe/tiny/short_answers.py`). True accuracy counts an
answer as right if the reference is among its words; it has at most 12 tokens. LoRA of rank 16 learns from 8 x 4
answers a step.

| seed | right, sampled | right, greedy | words, sampled | last batch's reward | a step (s) | all (min) | memory (GB) |
|---|---|---|---|---|---|---|---|
{rows}

Gains of true accuracy over three seeds: {gains}.
Time is that of the whole command, with its evaluations and the export; memory the peak of all its processes together,
each with its share of what they map (PSS).

![Learning curves of three seeds](../docs/smollm2.png)

The points at steps 10 and 20 are of the first 64 held-out questions, the others of all 128.

## What it learns, and what it doesn't

It sharpens and it formats. The model knew most answers: before training its most likely answer is a sentence that often
holds the right word, a sampled one rarely does. Afterwards nearly every sampled answer is the short sentence. It
learned no fact: no answer to a held-out question is in the training questions. It doesn't learn to answer in one word,
which the reward would pay more for: at the start a sampled word alone is nearly always a wrong one, so the right
sentence is what gets reinforced.

The last row is the same run with a reward for brevity alone (`brief` in this script). Its reward rises as well, and
true accuracy falls. The reward can't show it: the held-out evaluation does, by a rule that no reward sees. No alarm on
reward hacking rang: few sampled answers were right before, too, so that their accuracy had little to lose.
"""
MEMORY = re.compile(r"([0-9.]+) GB together, of \d+ processes; (\d+) s")


def brief(response: str) -> float:
    """A reward that can be had without an answer: 1 for an empty one, 0 from 12 words on."""
    return max(0.0, 1 - len(response.split()) / 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. right, words: the share of right answers, and the mean words of one, by evaluation: (first or last,
    sampled or greedy). reward: of the last step's batch. step_s: the median.
    """

    name: str
    right: dict[tuple[str, str], float]
    words: dict[tuple[str, str], float]
    reward: float
    step_s: float
    wall_s: float
    peak_gb: float


def run(folder: Path, name: str, weights: Path, overrides: list[str]) -> Run:
    run_dir, output = folder / name, folder / f"{name}.txt"
    if not (run_dir / "summary.json").exists():
        command = [sys.executable, "benchmarks/process_memory.py", sys.executable, "launch.py", "+experiment=smollm2"]
        command += [f"policy.path={weights}", f"run_dir={run_dir}", *overrides]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks"), "WANDB_MODE": "offline"}
        with output.open("w", encoding="utf-8") as file:
            subprocess.run(command, cwd=ROOT, env=environment, stdout=file, check=True)
    found = MEMORY.search(output.read_text(encoding="utf-8"))
    assert found is not None, f"{output} has no line about memory"
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "completed", f"{name}: {summary['status']}"
    steps = [record for record in read_journal(run_dir / "metrics.jsonl") if "time/step_s" in record]
    right, words = {}, {}
    rows = list(read_journal(run_dir / "eval_rollouts.jsonl"))
    for when, step in (("first", 0), ("last", max(row["step"] for row in rows))):
        for how, is_greedy in (("sampled", False), ("greedy", True)):
            chosen = [row for row in rows if row["step"] == step and (row["sample"] is None) == is_greedy]
            assert len(chosen) == 128, f"{run_dir}: {len(chosen)} {how} answers at step {step}"
            right[when, how] = fmean(row["right"] for row in chosen)
            words[when, how] = fmean(len(row["answer"].split()) for row in chosen)
    return Run(
        name=name,
        right=right,
        words=words,
        reward=steps[-1]["train/reward"],
        step_s=median(record["time/step_s"] for record in steps),
        wall_s=float(found[2]),
        peak_gb=float(found[1]),
    )


def report(runs: list[Run], brevity: Run) -> str:
    def row(one: Run) -> str:
        shares = [f"{one.right['first', how]:.2f} -> {one.right['last', how]:.2f}" for how in ("sampled", "greedy")]
        words = f"{one.words['first', 'sampled']:.1f} -> {one.words['last', 'sampled']:.1f}"
        cells = [one.name, *shares, words, f"{one.reward:.2f}", f"{one.step_s:.1f}", f"{one.wall_s / 60:.1f}"]
        return f"| {' | '.join([*cells, f'{one.peak_gb:.1f}'])} |"

    gains = {how: [one.right["last", how] - one.right["first", how] for one in runs] for how in ("sampled", "greedy")}
    gained = ", ".join(f"{how} {fmean(of):+.2f} (least {min(of):+.2f})" for how, of in gains.items())
    return PAGE.format(cores=os.cpu_count(), rows="\n".join(map(row, [*runs, brevity])), gains=gained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; finished ones there are used again")
    parser.add_argument("weights", type=Path, help="a GGUF file or a directory of the model")
    args = parser.parse_args()
    folder, weights = args.folder.resolve(), args.weights.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    runs = [run(folder, f"{seed}", weights, [f"seed={seed}"]) for seed in SEEDS]
    brevity = run(folder, "brevity", weights, [f"judge.function={BREVITY}"])
    plot = [sys.executable, "benchmarks/plot_learning_curve.py", *(str(folder / one.name) for one in runs)]
    plot += ["--no-score", "--title", "SmolLM2-135M answers short questions", "--out", str(PICTURE)]
    subprocess.run(plot, cwd=ROOT, check=True)
    page = report(runs, brevity)
    REPORT.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
