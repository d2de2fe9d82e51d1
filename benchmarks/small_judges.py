"""Small models as judges of word problems: verdicts that can be read, accuracy, AUC and tokens, by template and form.

    python benchmarks/small_judges.py runs/small_judges --models qwen=q.gguf smollm2=SmolLM2.gguf tiny=tiny://grm
    python benchmarks/small_judges.py runs/small_judges --models qwen=q.gguf --forms short yes_no

A right and a wrong answer to each of 100 held-out problems, labelled by the rule that made them. Finished evaluations
in the folder are reused. AUC is the share of pairs, a right answer and a wrong one, in which the right one scores
higher; a tie counts half. A judgement without a verdict counts half too: it says nothing. Intervals of 95 % are over
problems (bootstrap). Writes benchmarks/small_judges.md.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from quickstart import commit_date, machine

from grmpipe.tiny.problems import is_right, make_problems
from grmpipe.tiny.solutions import wrong_answer, wrong_from_here

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "small_judges.md"
PROBLEMS, DRAWS = 100, 1000
ALWAYS = (
    "task=evaluate", "evaluate.ks=[1]", f"evaluate.num_items={2 * PROBLEMS}", "grm=path", "judge.limits.max_retries=0",
    "judge.limits.timeout_s=3000", "judge.limits.min_tokens_per_s=0.05", "judge.max_failure_rate=1",
    "judge.limits.max_concurrency=32", "cluster=inprocess", "tracking=none",
)  # fmt: skip
# Name -> highest score, overrides. The prompt of the tiny judge is its own.
FORMS = {
    "pointwise": (10, ["judge=pointwise", "judge.max_new_tokens=96", "judge.format.ask_verdict=true"]),
    "short": (10, ["judge=short", "judge.format.ask_verdict=true"]),
    "short, 1 to 9": (9, ["judge=short", "judge.format.ask_verdict=true"]),
    "short, 1 to 9, expectation": (
        9, ["judge=short", "judge.format.ask_verdict=true", "judge.score_from=expectation"],
    ),
    "yes_no, text": (10, ["judge=yes_no", "judge.score_from=text"]),
    "yes_no, expectation": (10, ["judge=yes_no"]),
    "tiny": (10, ["judge=generative"]),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The scores of a right and a wrong answer to one problem, on [0, 1]. None: no verdict."""

    right: float | None
    wrong: float | None


def write_items(path: Path, highest: int) -> None:
    rng, lines = random.Random(0), []
    for index, problem in enumerate(make_problems("held_out", PROBLEMS, 0)):
        change = wrong_answer if index % 2 else wrong_from_here
        while is_right(problem, text := str(change(problem.solution, rng))):  # a slip may leave the answer as it was
            pass
        for subset, response, score in (("right", str(problem.solution), highest), ("wrong", text, 1)):
            item = {"item_id": f"{index}-{subset}", "subset": subset, "prompt": problem.question}
            lines.append(json.dumps({**item, "response": response, "score": score}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def evaluate(folder: Path, model: str, path: str, form: str) -> Path:
    run_dir = folder / f"{model}, {form}".replace(", ", "_").replace(" ", "_")
    highest, overrides = FORMS[form]
    if not (run_dir / "judged.jsonl").exists():
        write_items(items := folder / f"items_{highest}.jsonl", highest)
        command = [
            sys.executable, "launch.py", *ALWAYS, f"evaluate.path={items}", f"grm.path={path}", f"run_dir={run_dir}",
            f"judge.scale.high={highest}", *overrides,
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True)
    return run_dir


def read_judged(run_dir: Path, highest: int) -> list[Judged]:
    scores: dict[str, dict[str, float | None]] = {}
    for line in (run_dir / "judged.jsonl").read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        index, subset = item["item_id"].split("-")
        score = item["scores"].get("0")
        scores.setdefault(index, {})[subset] = None if score is None else (score - 1) / (highest - 1)
    return [Judged(right=one["right"], wrong=one["wrong"]) for one in scores.values()]


def auc(judged: Sequence[Judged]) -> float:
    rights, wrongs = [one.right for one in judged], [one.wrong for one in judged]
    wins = (
        0.5 if right is None or wrong is None or right == wrong else float(right > wrong)
        for right in rights
        for wrong in wrongs
    )
    return sum(wins) / (len(rights) * len(wrongs))


def accuracy(judged: Sequence[Judged]) -> float:
    """The share of answers on the right side of the middle of the scale; without a verdict: wrong."""
    sides = [one.right is not None and one.right > 0.5 for one in judged]
    return fmean(sides + [one.wrong is not None and one.wrong < 0.5 for one in judged])


def interval(judged: Sequence[Judged]) -> tuple[float, float]:
    rng = random.Random(0)
    drawn = sorted(auc(rng.choices(judged, k=len(judged))) for _ in range(DRAWS))
    return drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS) - 1]


def make_row(model: str, form: str, run_dir: Path) -> str:
    judged = read_judged(run_dir, FORMS[form][0])
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["judging"]
    asked = summary["asked"]
    readable = fmean([score is not None for one in judged for score in (one.right, one.wrong)])
    low, high = interval(judged)
    unasked = min(readable, 1 - summary["asked_verdicts"] / asked)
    figures = [f"{unasked:.2f}", f"{readable:.2f}", f"{accuracy(judged):.2f}"]
    figures += [f"{auc(judged):.2f} ({low:.2f} to {high:.2f})", f"{summary['tokens'] / asked:.0f}"]
    return f"| {' | '.join([model, form, *figures])} |"


PAGE = """\
# Small models as judges

`python benchmarks/small_judges.py runs/small_judges --models {models}`: {machine}; code of {date}.

{num} answers to {problems} word problems, half of them right, labelled by the rule that made them. One judgement of
each, never repeated, at temperature 1, `yes_no` at 0. *Unasked*: the share whose own verdict can be read; *asked*: with
those that were asked for it (`judge.format.ask_verdict`). Accuracy: on the right side of the middle of the scale. AUC:
the share of pairs, a right answer and a wrong one, in which the right one scores higher, ties and missing verdicts
half; .5 is no judge at all; intervals of 95 % over problems. Tokens: sampled, of a judgement.

| model | template and form | unasked | asked | accuracy | AUC | tokens |
|---|---|---|---|---|---|---|
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", required=True, help="name=path")
    parser.add_argument("--forms", nargs="*", default=[*FORMS])
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    models = dict(one.split("=", 1) for one in arguments.models)
    rows = [
        make_row(model, form, evaluate(folder, model, path, form))
        for model, path in models.items()
        for form in FORMS
        if form in arguments.forms and (form == "tiny") == path.startswith("tiny://")
    ]
    shown = " ".join(f"{name}={Path(path).name if '://' not in path else path}" for name, path in models.items())
    page = PAGE.format(
        models=shown, machine=machine(), date=commit_date(), num=2 * PROBLEMS, problems=PROBLEMS, rows="\n".join(rows)
    )
    REPORT.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
