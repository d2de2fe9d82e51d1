"""Agents: a policy that learns to use tools beside a judge of its calls, also while tools fail; credit by turn.

    OMP_NUM_THREADS=1 python benchmarks/agents.py runs/agents [--only tools faults outcome turns gigpo] [--seeds 0 1 2]

Runs each variant with each seed into runs/agents/<variant>_<seed>; finished runs are reused, interrupted ones
continued. The trained policy then plays 2048 held-out problems at T = 1, which no run has seen. Writes
benchmarks/agents.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from several_judges import launch

from grmpipe.observe.journal import read_journal
from grmpipe.tiny.quality import accuracy as accuracy_on
from grmpipe.tiny.resolve import resolve_model
from grmpipe.tiny.tasks import CALLS, WALKS
from grmpipe.tiny.tiny_sampler import TinySampler

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "agents.md"
NUM_PROBLEMS = 2048
HELD_OUT_SEED = 90_000
Z = 1.96  # of the normal distribution, 97.5 %
HOPS = "+judge.env_reward.weights.hop=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A run: what it shows and what is typed. `task`: tools or walk."""

    label: str
    task: str
    overrides: tuple[str, ...]


VARIANTS = {
    "tools": Variant(label="calculator, judged by a GRM", task="tools", overrides=("+experiment=tools",)),
    "faults": Variant(
        label="the same, the tools' process killed in a third of the episodes",
        task="tools",
        overrides=(
            "+experiment=tools",
            "env=custom",
            "env.target=benchmarks.killed_tools.KilledTools",
            "env.functions=",
            "+env.options={functions: grmpipe.tiny.tools, share: 0.33}",
            "env.isolation.kind=process",
        ),
    ),
    "outcome": Variant(label="walk, reward of the outcome", task="walk", overrides=("+experiment=walk",)),
    "turns": Variant(
        label="walk, outcome and rewards by turn (MT-GRPO)",
        task="walk",
        overrides=("+experiment=walk", "algorithm=mt_grpo", "judge.env_reward.by_turn=true", HOPS),
    ),
    "gigpo": Variant(
        label="walk, outcome by GiGPO",
        task="walk",
        overrides=("+experiment=walk", "algorithm=gigpo", "judge.env_reward.by_turn=true"),
    ),
}
STARTS = {"tools": "tiny://policy_tools", "walk": "tiny://policy_walk"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A finished run: the share of the problems that its policy gets right, and its summary.json.

    evaluations: the true accuracy of the evaluations during the run, by step.
    """

    true_accuracy: float
    summary: Mapping[str, Any]
    evaluations: Mapping[int, float]

    @property
    def dropped_share(self) -> float:
        groups = self.summary["groups"]
        dropped = sum(groups["dropped"].values())
        return float(dropped / (dropped + groups["trained"]))


def measured(folder: Path, name: str, seed: int, overrides: Sequence[str]) -> Measured:
    """Run the variant unless it is complete, then measure its policy."""
    run_dir = folder / f"{name}_{seed}"
    if not (run_dir / "summary.json").exists():
        launch(run_dir, [*VARIANTS[name].overrides, f"seed={seed}", *overrides])
    return Measured(
        true_accuracy=accuracy(VARIANTS[name].task, run_dir / "policy", run_dir / "accuracy.json"),
        summary=json.loads((run_dir / "summary.json").read_text(encoding="utf-8")),
        evaluations=evaluations(run_dir),
    )


def evaluations(run_dir: Path) -> dict[int, float]:
    records = read_journal(run_dir / "metrics.jsonl")
    return {int(one["step"]): one["eval/true_accuracy"] for one in records if "eval/true_accuracy" in one}


def accuracy(task: str, policy: Path, known: Path) -> float:
    """The policy's true accuracy at T = 1, remembered in the file `known`."""
    if not known.exists():
        asked = CALLS if task == "tools" else WALKS
        found = accuracy_on(asked, TinySampler(policy), asked.draw("held_out", NUM_PROBLEMS, HELD_OUT_SEED))
        known.write_text(json.dumps({"true_accuracy": found}) + "\n", encoding="utf-8")
    return float(json.loads(known.read_text(encoding="utf-8"))["true_accuracy"])


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` problems (Wilson 1927)."""
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return middle - half, middle + half


def shown(share: float) -> str:
    low, high = wilson(share, NUM_PROBLEMS)
    return f"{share:.3f} ({low:.3f} to {high:.3f})"


def table(starts: Mapping[str, float], runs: Mapping[str, Mapping[int, Measured]]) -> list[str]:
    seeds = list(next(iter(runs.values())))
    lines = [
        f"| run | start | {' | '.join(f'seed {seed}' for seed in seeds)} | smallest gain | seconds | groups dropped |",
        "|---" * (len(seeds) + 5) + "|",
    ]
    for name, some in runs.items():
        variant, start = VARIANTS[name], starts[VARIANTS[name].task]
        values = [one.true_accuracy for one in some.values()]
        seconds = statistics.fmean(one.summary["wall_s"] for one in some.values())
        dropped = statistics.fmean(one.dropped_share for one in some.values())
        cells = [variant.label, f"{start:.3f}", *map(shown, values), f"{min(values) - start:+.3f}"]
        lines.append(f"| {' | '.join([*cells, f'{seconds:.0f}', f'{dropped:.1%}'])} |")
    return lines


def curves(runs: Mapping[str, Mapping[int, Measured]]) -> list[str]:
    """The true accuracy of the evaluations during the runs, as means over the seeds."""
    by_step = {name: [one.evaluations for one in some.values()] for name, some in runs.items()}
    steps = sorted({step for some in by_step.values() for one in some for step in one})
    lines = [f"| run, by step | {' | '.join(map(str, steps))} |", "|---" * (len(steps) + 1) + "|"]
    for name, some in by_step.items():
        cells = [
            f"{statistics.fmean(one[step] for one in some):.2f}" if all(step in one for one in some) else ""
            for step in steps
        ]
        lines.append(f"| {VARIANTS[name].label} | {' | '.join(cells)} |")
    return lines


def failures(runs: Mapping[str, Mapping[int, Measured]]) -> list[str]:
    """What failed in each run, by cause."""
    found = [
        f"- {name}, seed {seed}: {json.dumps(one.summary['groups']['dropped'])}"
        for name, some in runs.items()
        for seed, one in some.items()
        if one.summary["groups"]["dropped"]
    ]
    return ["Groups dropped, by cause:", "", *found] if found else ["No group was dropped."]


def report(starts: Mapping[str, float], runs: Mapping[str, Mapping[int, Measured]]) -> str:
    lines = [
        "# Agents on two cores",
        "",
        "Written by `benchmarks/agents.py`.",
        f"After 80 steps (walks: 40) of 16 groups of 8 each policy plays {NUM_PROBLEMS} held-out problems",
        "at T = 1; in brackets the 95 % interval of a share (Wilson). Seconds: of a run with its evaluations.",
        "",
        *table(starts, runs),
        "",
        "256 other held-out problems during the runs, sampled; means over the seeds:",
        "",
        *curves(runs),
        "",
        *failures(runs),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    tasks = dict.fromkeys(VARIANTS[name].task for name in given.only)
    starts = {
        task: accuracy(task, Path(resolve_model(STARTS[task])), given.folder / f"start_{task}.json") for task in tasks
    }
    runs = {
        name: {seed: measured(given.folder, name, seed, given.overrides) for seed in given.seeds} for name in given.only
    }
    REPORT.write_text(report(starts, runs), encoding="utf-8")
    print(REPORT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
