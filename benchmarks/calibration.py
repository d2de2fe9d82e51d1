"""Calibrated judges: the expected error of tiny judges before and after, and a cascade with a calibrated first judge.

    OMP_NUM_THREADS=1 python benchmarks/calibration.py runs/calibration [--seeds 0 1 2]

Labels: 2,048 scored solutions of tiny problems, for each judge. Cascade: that of conf/experiment/cascade.yaml with
tiny://weak_grm as its first judge. Each seed has answers of the tiny policy, to 128 problems for the labels and to 128
others for the cascade, eight to each. The cascade judges the same answers twice: as it is, and with the first judge
calibrated. The calibrated band is symmetric, and as wide as escalates the same share of the groups with labels.
Finished runs are reused. Writes benchmarks/calibration.md, up to its part by hand.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmark_page import write_page

from grmpipe.judge.calibration import compute_log_length, read_calibration
from grmpipe.tiny.judgements import ScoredText, make_judgements
from grmpipe.tiny.problems import is_right, make_problems
from grmpipe.tiny.resolve import resolve_model
from grmpipe.tiny.tiny_sampler import MAX_ANSWER_TOKENS, TinySampler

ROOT = Path(__file__).parents[1]
NUM_ITEMS, NUM_PROBLEMS, GROUP_SIZE = 2048, 128, 8
SEED_OF_PROBLEMS = 70_000
VOTES = ("judge.num_judgements=4", "judge.max_new_tokens=128")
CASCADE = (
    "task=score", "+experiment=cascade", "models.cheap.path=tiny://weak_grm", "judges.cheap.max_new_tokens=128",
)  # fmt: skip
BAND = (0.3, 0.7)  # conf/experiment/cascade.yaml
HIGH, LOW = 10, 1  # the scale
ABOUT_LABELS = f"""\
`task=calibrate` on {NUM_ITEMS:,} scored solutions of as many tiny problems, one judgement each; and on the labels of
the cascade below, {NUM_PROBLEMS} problems with {GROUP_SIZE} answers, four judgements each. Half of the prompts are
fitted, the other half is measured. Expected calibration error over 15 bins, with its 95 % interval over prompts; mean
squared error; slope of the reward by log length within the responses to a prompt, and that of the labels."""
ABOUT_CASCADE = f"""\
`tiny://weak_grm`, asked four times, before `tiny://grm` (`+experiment=cascade models.cheap.path=tiny://weak_grm`
`judges.cheap.max_new_tokens=128`), on {NUM_PROBLEMS} groups of {GROUP_SIZE} answers of the tiny policy. First the band
[0.3, 0.7] of what it says; then calibrated with `calibrate.length=true` on as many answers to other problems, the band
of probabilities as wide as escalates as many of their groups, and `reward.share` what was escalated before. Errors of
the cascade's rewards against what is right by the rule, over all answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers to a problem, and whether each is right."""

    question: str
    texts: tuple[str, ...]
    right: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of a cascade's rewards, against what is right. wrong_side: of 0.5."""

    escalated: float
    distance: float
    squared: float
    wrong_side: float
    failed: int


def launch(run_dir: Path, *overrides: str) -> Path:
    """Run launch.py, unless it is complete here. Exits if it fails."""
    summary = run_dir / "summary.json"
    if summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "completed":
        return run_dir
    shutil.rmtree(run_dir, ignore_errors=True)  # of a run that failed
    command = [sys.executable, "launch.py", *overrides, "cluster=inprocess", f"run_dir={run_dir}"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        sys.exit(f"{' '.join(command)} failed")
    return run_dir


def read_rows(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_rows(file: Path, rows: Sequence[object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


# -- labels ------------------------------------------------------------------------------------------------------------


def calibrate_on_labels(folder: Path, judge: str) -> Path:
    made = make_judgements("held_out", 2 * NUM_ITEMS, SEED_OF_PROBLEMS)  # ranked ones in turn with scored ones
    rows = [
        {"prompt": one.problem.question, "response": one.text, "score": one.score}
        for one in made
        if isinstance(one, ScoredText)
    ]
    labels = write_rows(folder / "labels.jsonl", rows)
    asked = (f"grm=tiny_{judge}", f"evaluate.path={labels}", f"evaluate.num_items={NUM_ITEMS}")
    return launch(folder / judge, "task=calibrate", *asked)


def describe_calibration(name: str, run_dir: Path) -> str:
    measured = json.loads((run_dir / "calibration.json").read_text(encoding="utf-8"))["measured"]
    before, after = measured["before"], measured["after"]
    slopes = [before["length_slope"], after["length_slope"], measured["label_slope"]]
    cells = [describe_error(before), describe_error(after), f"{after['error']['mean'] / before['error']['mean']:.2f}"]
    cells += [f"{one['squared_error']:.3f}" for one in (before, after)]
    cells += ["-" if slope is None else f"{slope:+.3f}" for slope in slopes]
    return f"| {name} | {' | '.join(cells)} |"


def describe_error(one: Mapping[str, Any]) -> str:
    error = one["error"]
    return f"{error['mean']:.3f} ({max(0, error['low']):.3f} to {error['high']:.3f})"


# -- the cascade -------------------------------------------------------------------------------------------------------


def answer_problems(policy: TinySampler, seed: int) -> list[Answers]:
    """Twice NUM_PROBLEMS: for the labels, then for the cascade."""
    problems = make_problems("held_out", 2 * NUM_PROBLEMS, SEED_OF_PROBLEMS + seed)
    asked = [problem.question for problem in problems for _ in range(GROUP_SIZE)]
    texts = policy.answer(asked, MAX_ANSWER_TOKENS, seed=seed)
    groups = [texts[start : start + GROUP_SIZE] for start in range(0, len(texts), GROUP_SIZE)]
    return [
        Answers(
            question=problem.question,
            texts=tuple(own),
            right=tuple(is_right(problem, text) for text in own),
        )
        for problem, own in zip(problems, groups, strict=True)
    ]


def measure_seed(folder: Path, policy: TinySampler, seed: int) -> tuple[Errors, Errors]:
    """The cascade as it is, and calibrated."""
    answers = answer_problems(policy, seed)
    labelled, judged = answers[:NUM_PROBLEMS], answers[NUM_PROBLEMS:]
    labels = write_rows(
        folder / f"labels_{seed}.jsonl",
        [
            {"prompt": one.question, "response": text, "score": HIGH if right else LOW}
            for one in labelled
            for text, right in zip(one.texts, one.right, strict=True)
        ],
    )
    responses = write_rows(
        folder / f"responses_{seed}.jsonl", [{"prompt": one.question, "responses": one.texts} for one in judged]
    )
    calibrated = launch(
        folder / f"cheap_{seed}", "task=calibrate", "grm=tiny_weak", *VOTES, f"evaluate.path={labels}", f"seed={seed}",
        f"evaluate.num_items={NUM_PROBLEMS * GROUP_SIZE}", "calibrate.length=true",
    )  # fmt: skip
    low, high = match_band(calibrated)
    asked = (*CASCADE, f"score.path={responses}", f"seed={seed}")
    as_it_is = launch(folder / f"as_it_is_{seed}", *asked)
    share = read_escalated(as_it_is)
    with_band = launch(
        folder / f"calibrated_{seed}", *asked, f"judges.cheap.calibration={calibrated / 'calibration.json'}",
        f"reward.unsure_band=[{low:.6f},{high:.6f}]", f"reward.share={share}",
    )  # fmt: skip
    return measure_errors(as_it_is, judged), measure_errors(with_band, judged)


def match_band(run_dir: Path) -> tuple[float, float]:
    """The symmetric band of calibrated rewards that holds one of as many groups with labels as BAND does of what the
    judge says.
    """
    calibration = read_calibration(str(run_dir / "calibration.json"))
    groups: dict[str, list[tuple[float, float]]] = {}
    for row in read_rows(run_dir / "judged.jsonl"):
        if "0" in row["scores"]:
            said, length = (row["scores"]["0"] - LOW) / (HIGH - LOW), compute_log_length(row["responses"][0])
            groups.setdefault(str(row["prompt"]), []).append((said, calibration.to_reward(said, length)))
    unsure = sum(any(BAND[0] <= said <= BAND[1] for said, _ in own) for own in groups.values())
    distances = sorted(min(abs(reward - 0.5) for _, reward in own) for own in groups.values())
    half = distances[max(0, unsure - 1)]
    return 0.5 - half, 0.5 + half


def read_escalated(run_dir: Path) -> float:
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return float(summary["judging"]["cascades"]["reward"]["escalated_share"])


def measure_errors(run_dir: Path, judged: Sequence[Answers]) -> Errors:
    verdicts = [row["verdicts"] for row in read_rows(run_dir / "verdicts.jsonl")]
    pairs = [
        (verdict["reward"], float(right))
        for own, one in zip(verdicts, judged, strict=True)
        for verdict, right in zip(own, one.right, strict=True)
    ]
    known = [(reward, right) for reward, right in pairs if reward is not None]
    return Errors(
        escalated=read_escalated(run_dir),
        distance=fmean(abs(reward - right) for reward, right in known),
        squared=fmean((reward - right) ** 2 for reward, right in known),
        wrong_side=fmean((reward >= 0.5) != (right >= 0.5) for reward, right in known),
        failed=len(pairs) - len(known),
    )


def describe_seed(seed: int, as_it_is: Errors, calibrated: Errors) -> str:
    cells = [f"{one.escalated:.3f}" for one in (as_it_is, calibrated)]
    for name in ("distance", "squared", "wrong_side"):
        was, now = getattr(as_it_is, name), getattr(calibrated, name)
        cells += [f"{was:.3f}", f"{now:.3f}", f"{now / was if was else math.nan:.2f}"]
    return f"| {seed} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; finished ones there are used again")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    policy = TinySampler(Path(resolve_model("tiny://policy")))
    cascades = [describe_seed(seed, *measure_seed(folder, policy, seed)) for seed in args.seeds]
    labels = [
        describe_calibration(f"`{name}`", calibrate_on_labels(folder, judge))
        for judge, name in (("weak", "weak_grm"), ("noisy", "grm_noisy"))
    ]
    labels += [
        describe_calibration(f"`weak_grm`, with length, seed {seed}", folder / f"cheap_{seed}") for seed in args.seeds
    ]
    lines = [
        "# Calibrated judges",
        "",
        f"`python benchmarks/calibration.py runs/calibration --seeds {' '.join(map(str, args.seeds))}`",
        "",
        "## Expected error",
        "",
        ABOUT_LABELS,
        "",
        "| judge | expected error before | after | ratio | squared error before | after "
        "| slope before | after | labels |",
        "|---" * 9 + "|",
        *labels,
        "",
        "## A cascade with a calibrated first judge",
        "",
        ABOUT_CASCADE,
        "",
        "| seed | escalated | calibrated | mean distance | calibrated | ratio | squared | calibrated | ratio "
        "| wrong side of 0.5 | calibrated | ratio |",
        "|---" * 12 + "|",
        *cascades,
    ]
    write_page(ROOT / "benchmarks" / "calibration.md", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
