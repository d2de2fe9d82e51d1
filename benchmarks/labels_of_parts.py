"""Judges that learn from labels of single criteria, and of single steps: right judgements before and after.

    OMP_NUM_THREADS=1 python benchmarks/labels_of_parts.py runs/labels_of_parts [--seeds 0 1 2]

Writes files of labels as people would (docs/labels.md), trains `+experiment=train_grm` on them, and compares the run's
own evaluations of held-out labels at its beginning and its end. Finished runs are reused. Writes
benchmarks/labels_of_parts.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file

from grmpipe.tiny.examples import draw_openings, draw_phrase, open_with, says, split_opening
from grmpipe.tiny.problems import Problem, is_right, list_results, make_problems, parse_solution
from grmpipe.tiny.resolve import resolve_model
from grmpipe.tiny.tasks import SUMS

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "labels_of_parts.md"
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # 97.5 % points by degrees of freedom
SIZES = {"train": 4096, "held_out": 1024}
IS_RIGHT = "The answer is right."
QUIET = ("cluster=inprocess", "tracking=none", "tracking.console=false", "judge_monitor.every=0")
STEP_END = ";"
# The marks of the tiny judge's own comparison: "Check: 13 / 13 ok; 26 / 27 no; answer 26 / 27 no.", then its score.
FORM = r"""from grmpipe.judge.parse import Form

marks = Form(
    line=lambda number, scale, num_scores: (
        r".*Check: " + "; ".join([r"[^;\n]*? (ok|no)"] * num_scores) + r"[;.][^\n]*\nScore: [0-9]+"
    ),
    most_lines=2,
    scores_of=lambda found, scale: tuple(float(scale.high if mark == "ok" else scale.low) for mark in found),
)
"""
TEMPLATE = "Q: {{ question }}\nA:\n{% for step in steps %}{{ step }}{% endfor %}"
ARMS = {
    "criteria": (
        "grm.path={folder}/half_way", "judge.protocol=rubric", "judge.template=tiny_criteria",
        "judge.parser=score_line", "judge.rubric.criteria_per_call=1",
    ),
    "steps": (
        "judge.protocol=steps", "judge.template={folder}/by_steps.jinja", "judge.parser=marks_form.marks",
        f"judge.split.step_end='{STEP_END}'",
    ),
}  # fmt: skip
HALF_WAY = 0.7  # of the way from tiny://grm to its child
ABOUT = f"""Labels are of the tiny sums' rule. **Criteria**: rows `response`, `criterion`, `right`, on whether an
answer is right or says a phrase. `tiny://grm_criteria` passes every answer that opens with a phrase as right, without a
doubt that learning could use; so the judge begins {HALF_WAY:.0%} of the way from its parent `tiny://grm` to it (a mean
of weights). **Steps**: rows `completions`, `labels` (TRL's stepwise supervision). `tiny://weak_grm`, which never saw
steps one by one, marks each with `ok` or `no`. {SIZES["train"]:,} labelled responses each, and {SIZES["held_out"]:,}
held-out ones on other problems; half of the answers are made right. Right is a judgement whose every score agrees with
its label, at T = 1."""


def write_text(problem: Problem, rng: random.Random) -> str:
    return SUMS.texts["right" if rng.random() < 0.5 else rng.choice(("sloppy", "corrupted"))](problem, rng)


def label_criteria(problem: Problem, rng: random.Random) -> dict[str, object]:
    text = open_with(draw_openings(rng), write_text(problem, rng))
    phrases, work = split_opening(text)
    criterion, met = IS_RIGHT, is_right(problem, work)
    if rng.random() < 0.5:
        phrase = rng.choice(phrases) if phrases and rng.random() < 0.5 else draw_phrase(rng)
        criterion, met = says(phrase), phrase in phrases
    return {"prompt": problem.question, "response": text, "criterion": criterion, "right": met}


def label_steps(problem: Problem, rng: random.Random) -> dict[str, object] | None:
    """None: an answer that isn't worked out in as many steps."""
    text = write_text(problem, rng)
    solution = parse_solution(text)
    if solution is None or len(solution.steps) != len(problem.steps):
        return None
    texts = [part + STEP_END for part in text.split(STEP_END)]
    texts[-1] = texts[-1].removesuffix(STEP_END)
    pairs = zip(list_results(problem.steps), list_results(solution.steps), strict=True)
    labels = [mine == theirs for mine, theirs in pairs]
    labels[-1] &= solution.answer == problem.answer  # the last step says the answer, too
    return {"prompt": problem.question, "completions": texts, "labels": labels}


def make_half_way(directory: Path) -> None:
    child, parent = (Path(resolve_model(f"tiny://{name}")) for name in ("grm_criteria", "grm"))
    shutil.copytree(child, directory, dirs_exist_ok=True)
    ends = [load_file(one / "model.safetensors") for one in (parent, child)]
    mixed = {name: ends[0][name].float().lerp(ends[1][name].float(), HALF_WAY).to(ends[1][name]) for name in ends[1]}
    save_file(mixed, directory / "model.safetensors", metadata={"format": "pt"})


def draw_rows(arm: str, split: str) -> Iterator[dict[str, object]]:
    rng, label = random.Random(f"{arm} {split}"), {"criteria": label_criteria, "steps": label_steps}[arm]
    problems = make_problems("train" if split == "train" else "held_out", 2 * SIZES[split], 5)
    rows = (label(problem, rng) for problem in problems)
    kept = [row for row in rows if row is not None]
    yield from kept[: SIZES[split]]


def launch(folder: Path, arm: str, seed: int, *overrides: str) -> dict[str, float]:
    """The final figures of a run, and those of its beginning as `start.`"""
    run_dir = folder / f"{arm}_{seed}"
    if not (run_dir / "summary.json").exists():
        files = {split: folder / f"{arm}_{split}.jsonl" for split in SIZES}
        for split, file in files.items():
            file.write_text("".join(json.dumps(row) + "\n" for row in draw_rows(arm, split)))
        command = [
            sys.executable, "launch.py", "+experiment=train_grm", *(one.format(folder=folder) for one in ARMS[arm]),
            f"data.path={files['train']}", f"data.eval_path={files['held_out']}", *QUIET, f"seed={seed}",
            f"data.num_eval_prompts={SIZES['held_out']}", "evaluate.every=1000", f"run_dir={run_dir}", *overrides,
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0:
            sys.exit(f"{' '.join(command)} failed")
    summary = json.loads((run_dir / "summary.json").read_text())
    return {when: summary["eval"][when]["true_accuracy"] for when in ("initial", "final")}


def describe(values: list[float]) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    half = STUDENT_T[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ({mean - half:.3f} to {mean + half:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("overrides", nargs="*", default=[], help="settings of every run, to try them: writes no page")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make_half_way(folder / "half_way")
    (folder / "marks_form.py").write_text(FORM)
    (folder / "by_steps.jinja").write_text(TEMPLATE)
    rows = []
    for arm in given.arms:
        runs = [launch(folder, arm, seed, *given.overrides) for seed in given.seeds]
        before, after = ([run[when] for run in runs] for when in ("initial", "final"))
        gains = [one - other for one, other in zip(after, before, strict=True)]
        rows.append(f"| {arm} | {describe(before)} | {describe(after)} | {describe(gains)} |")
    page = [
        "# Labels of steps and of criteria", "", ABOUT, "",
        "| labels of | right before | right after | gain |", "|---|---|---|---|", *rows, "",
        f"Seeds {', '.join(map(str, given.seeds))}; means with 95 % intervals over them. "
        "`OMP_NUM_THREADS=1 python benchmarks/labels_of_parts.py runs/labels_of_parts`",
    ]  # fmt: skip
    print("\n".join(page))
    if not given.overrides and given.arms == list(ARMS):
        REPORT.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
