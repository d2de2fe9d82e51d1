"""Compares what this checkout and an earlier commit sample and learn: whole runs of the quickstart, or another recipe.

    python benchmarks/same_run.py b0a4aaf runs/same_run --then watch.every=0 --now judge_monitor.every=0

One process, staleness 0, 20 steps (`--steps`). Both run more than once (`--runs`): a commit's own runs differ too, by
the order in which groups happen to arrive. `--now` and `--then` add overrides to one side, whose keys may have other
names. Finished runs in the folder are reused. Rollouts are matched by prompt and sibling. Writes
benchmarks/same_run.md; of another recipe (`--experiment cotrain`) it only prints the table.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from against_commit import worktree_of
from quickstart import ROOT, machine
from safetensors.torch import load_file
from torch import Tensor

from grmpipe.observe.journal import read_journal

REPORT = ROOT / "benchmarks" / "same_run.md"
SHARED = ("cluster=inprocess", "tracking=none", "train.max_staleness=0")

Key = tuple[int, int]  # prompt index, sibling


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One sampled rollout. step: that trained it."""

    step: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The compared parts of a run."""

    rollouts: dict[Key, Sampled]
    weights: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of two runs. first_step: the first that trained a rollout of other tokens; None if there is
    none.
    """

    num_rollouts: int
    num_other_tokens: int
    first_step: int | None
    logprobs: float  # the largest, in nats, of rollouts with the same tokens
    weights: float  # the largest


def run_once(checkout: Path, run_dir: Path, experiment: str, overrides: Sequence[str]) -> Recorded:
    """Run a recipe of a checkout, unless a finished run is there. Exits if it fails."""
    if not (run_dir / "summary.json").exists():
        command = [sys.executable, "launch.py", f"+experiment={experiment}", *SHARED, *overrides, f"run_dir={run_dir}"]
        env = os.environ | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(command, cwd=checkout, env=env, stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} in {checkout} ended with code {done.returncode}")
    return read_run(run_dir)


def read_run(run_dir: Path) -> Recorded:
    steps = {
        line["group_id"]: line["step"]
        for line in read_journal(run_dir / "groups.jsonl")
        if line["outcome"] == "trained"
    }
    rollouts = {
        (prompt_index_of(line), line["sibling"]): sampled_in(line, steps[line["group_id"]])
        for line in read_journal(run_dir / "rollouts.jsonl")
        if line["group_id"] in steps
    }
    return Recorded(rollouts=rollouts, weights=load_file(run_dir / "policy" / "model.safetensors"))


def prompt_index_of(line: dict) -> int:
    """The prompt index, which earlier commits call `draw`."""
    return line["prompt_index"] if "prompt_index" in line else line["draw"]


def sampled_in(line: dict, step: int) -> Sampled:
    turns = line["turns"]
    return Sampled(
        step=step,
        token_ids=tuple(token for turn in turns for token in turn["token_ids"]),
        logprobs=tuple(logprob for turn in turns for logprob in turn["logprobs"]),
    )


def difference(one: Recorded, other: Recorded) -> Difference:
    """The difference of two runs. Exits if they trained other prompts, because nothing else can be compared then."""
    if one.rollouts.keys() != other.rollouts.keys():
        sys.exit(f"{len(one.rollouts.keys() ^ other.rollouts.keys())} rollouts are in one of the runs only")
    pairs = [(sampled, other.rollouts[key]) for key, sampled in one.rollouts.items()]
    differing = [a.step for a, b in pairs if a.token_ids != b.token_ids]
    alike = [zip(a.logprobs, b.logprobs, strict=True) for a, b in pairs if a.token_ids == b.token_ids]
    return Difference(
        num_rollouts=len(pairs),
        num_other_tokens=len(differing),
        first_step=min(differing, default=None),
        logprobs=max((abs(a - b) for logprobs in alike for a, b in logprobs), default=0.0),
        weights=max(float((weight - other.weights[name]).abs().max()) for name, weight in one.weights.items()),
    )


def report(typed: Sequence[str], steps: int, rows: dict[str, list[Difference]]) -> list[str]:
    """The page. typed: the arguments of the command; rows: the pairs of runs that each row compares."""
    lines = [
        f"# The quickstart's run compared with that of commit {typed[0]}",
        "",
        f"`python benchmarks/same_run.py {' '.join(typed)}`: {machine()}.",
        f"One process, staleness 0, {steps} steps.",
        "",
        "| pairs of runs | rollouts of a pair | with other tokens | first step with one | log-probs, nats | weights |",
        "|---|---|---|---|---|---|",
    ]
    for label, pairs in rows.items():
        first = min((pair.first_step for pair in pairs if pair.first_step is not None), default="none")
        lines.append(
            f"| {len(pairs)}: {label} | {pairs[0].num_rollouts} | {max(pair.num_other_tokens for pair in pairs)} | "
            f"{first} | {middle_and_largest([pair.logprobs for pair in pairs])} | "
            f"{middle_and_largest([pair.weights for pair in pairs])} |"
        )
    lines += [
        "",
        "Log-probs (of rollouts with the same tokens) and weights at the end: a pair's largest difference; here the",
        "median of the pairs and, in brackets, the largest.",
    ]
    return lines


def middle_and_largest(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1e} ({max(values):.1e})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="to be compared with this checkout")
    parser.add_argument("folder", type=Path, help="for the runs; finished ones there are used again")
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=int, default=2, help="of each side")
    parser.add_argument("--now", action="append", default=[], metavar="KEY=VALUE", help="override of this checkout")
    parser.add_argument("--then", action="append", default=[], metavar="KEY=VALUE", help="override of the commit")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    checkout, steps = worktree_of(args.commit, folder), f"train.num_steps={args.steps}"
    name, runs, recipe = f"{args.experiment}_{args.steps}", range(args.runs), args.experiment
    old = f"then_{args.commit}_{name}"
    then = [run_once(checkout, folder / f"{old}_{run}", recipe, (steps, *args.then)) for run in runs]
    now = [run_once(ROOT, folder / f"now_{name}_{run}", recipe, (steps, *args.now)) for run in runs]
    rows = {
        f"now, {args.commit}": [difference(*pair) for pair in itertools.product(now, then)],
        f"{args.commit}, {args.commit}": [difference(*pair) for pair in itertools.combinations(then, 2)],
    }
    overrides = [f"--now {key}" for key in args.now] + [f"--then {key}" for key in args.then]
    typed = [args.commit, "runs/same_run", f"--steps {args.steps}", f"--runs {args.runs}", *overrides]
    lines = report(typed, args.steps, rows)
    if recipe == "quickstart":
        REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
