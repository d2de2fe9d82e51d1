"""Compares what a policy learns from its judge, from a teacher and from both, and from itself told more than it knew.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py run runs/distillation --seeds 0 1 2 3 4
    python benchmarks/distillation.py report runs/distillation

Runs one after another in this process, on one core. A run that has ended is not repeated. The report,
benchmarks/distillation.md, is made from the runs' files.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import grmpipe
from grmpipe.judge.teaching import Insertion, Reports, Rollouts, TeacherContext
from grmpipe.run.build import make_judge
from grmpipe.types import Prompt

REPORT = Path(__file__).parent / "distillation.md"
TARGET = 0.70  # mean true accuracy of the rollouts of WINDOW steps
WINDOW = 10
COMMON = (
    "cluster=inprocess", "tracking=none", "tracking.console=false", "train.checkpoint_every=0", "judge_monitor.every=0",
)  # fmt: skip
TAUGHT = ("+experiment=distill", "train.num_steps=60", "data.num_eval_prompts=2048")
TOLD = ("policy=tiny_told", "train.num_steps=40", "train.lr=1e-3", "data.num_eval_prompts=2048")
ITSELF = ("+experiment=self_distill", *TOLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of learning. shuffled: each answer's teacher reads the critique of a sibling."""

    part: str
    overrides: tuple[str, ...]
    shuffled: bool = False


ARMS: Mapping[str, Arm] = {
    "judge": Arm(part="teacher", overrides=("+experiment=quickstart", *TAUGHT[1:])),
    "teacher": Arm(part="teacher", overrides=(*TAUGHT, "reward=none")),
    "judge and teacher": Arm(part="teacher", overrides=TAUGHT),
    "GRPO": Arm(part="itself", overrides=("+experiment=quickstart", *TOLD)),
    "told the critique": Arm(part="itself", overrides=ITSELF),
    "told the critique of a sibling": Arm(part="itself", overrides=ITSELF, shuffled=True),
    "told the reference": Arm(
        part="itself", overrides=(*ITSELF, 'algorithm.distill.context="\\n> Answer: {reference}"')
    ),
}


class ShuffledCritiques(TeacherContext):
    """Shows of each sibling what was written about the next one."""

    @property
    def waits(self) -> bool:
        return True

    def find(self, prompt: Prompt, sibling: int, rollouts: Rollouts, reports: Reports) -> Insertion | None:
        other = reports[(sibling + 1) % len(reports)]
        judgements = tuple(replace(one, siblings=(sibling,)) for one in other.judgements)
        return super().find(
            prompt, sibling, rollouts, {**reports, sibling: replace(reports[sibling], judgements=judgements)}
        )


def run(folder: Path, name: str, seed: int) -> None:
    """Run an arm, unless its result is there."""
    arm, run_dir = ARMS[name], folder / f"{name.replace(' ', '_')}_{seed}"
    if (run_dir / "summary.json").exists():
        return
    config = grmpipe.compose(overrides=[*arm.overrides, *COMMON, f"seed={seed}", f"run_dir={run_dir}"])
    with patch.object(make_judge, "TeacherContext", ShuffledCritiques if arm.shuffled else TeacherContext):
        grmpipe.launch(config)


# -- the report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """reached: the step that ends the first WINDOW steps with a mean of at least TARGET; None: none does."""

    seed: int
    reached: int | None
    accuracy: float
    steps: int


def read_results(folder: Path, name: str) -> Iterator[Result]:
    for path in sorted(folder.glob(f"{name.replace(' ', '_')}_[0-9]*/summary.json")):
        summary = json.loads(path.read_text())
        lines = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        right = [line["train/true_accuracy"] for line in lines if "train/true_accuracy" in line]
        means = [statistics.fmean(right[end - WINDOW : end]) for end in range(WINDOW, len(right) + 1)]
        reached = next((place + WINDOW for place, mean in enumerate(means) if mean >= TARGET), None)
        yield Result(
            seed=int(path.parent.name.rpartition("_")[2]),
            reached=reached,
            accuracy=summary["eval"]["final"]["true_accuracy"],
            steps=len(right),
        )


def table(folder: Path, part: str) -> str:
    return "\n".join(make_rows(folder, part))


def make_rows(folder: Path, part: str) -> Iterator[str]:
    yield f"| | step of {TARGET:.2f}, by seed | median | accuracy at the end, by seed | mean |"
    yield "|---|---|---|---|---|"
    for name in (name for name, arm in ARMS.items() if arm.part == part):
        results = list(read_results(folder, name))
        if not results:
            continue
        steps = [one.reached for one in results]
        median = statistics.median(one.steps + 1 if one.reached is None else one.reached for one in results)
        shown = ", ".join(str(step) if step else f"> {one.steps}" for step, one in zip(steps, results, strict=True))
        ends = ", ".join(f"{one.accuracy:.3f}" for one in results)
        yield f"| {name} | {shown} | {median:g} | {ends} | {statistics.fmean(one.accuracy for one in results):.3f} |"


def write_report(folder: Path) -> None:
    seeds = " ".join(map(str, sorted({one.seed for name in ARMS for one in read_results(folder, name)})))
    REPORT.write_text(f"""# Learning from a judge, from a teacher, and from oneself

`python benchmarks/distillation.py run runs/distillation --seeds {seeds}`, then `report`. A step is 128 rollouts. The
step of {TARGET:.2f} is the last of the first {WINDOW} whose rollouts are right at that rate; accuracy at the end is of
2,048 held-out problems, sampled at temperature 1 (standard error .01).

## A judge, a teacher, both

`+experiment=distill`, 60 steps; the teacher alone with `reward=none`, the judge alone with `+experiment=quickstart`.

{table(folder, "teacher")}

## The policy as its own teacher

`policy=tiny_told train.lr=1e-3`, 40 steps: GRPO with the judge alone, and beside it the policy as it was at the start,
told more (`+experiment=self_distill`).

{table(folder, "itself")}

The judge's critiques begin with its own solution, so that of a sibling teaches as much: what teaches is the solution,
not the verdict on the answer. The tiny policy was never trained to read a bare reference: what it scores after one is
noise.
""")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    args = parser.parse_args()
    if args.action == "run":
        for seed in args.seeds:
            for name in args.arms:
                run(args.folder, name, seed)
    write_report(args.folder)


if __name__ == "__main__":
    main()
