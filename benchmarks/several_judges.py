"""Several judges in one run: a jury against its members, a cascade against its good judge, a route against two runs.

    OMP_NUM_THREADS=1 python benchmarks/several_judges.py jury runs/several_judges [cluster=inprocess] [--seeds 0 1 2]

Also `votes` (those of the jury), `cascade`, `cascade_learning` (its cheap judge learns from the good one), `route`,
`itself` (a policy that judges itself) and `self_judging` (one that learns to judge, too). Each comparison runs its
variants, or those after --only, side by side for every seed into
runs/several_judges/<variant>_<seed>; finished runs are reused, interrupted ones continued. The trained policy then
answers 2048 held-out problems at T = 1, which no run has seen. Writes benchmarks/several_judges/<comparison>.md.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from cascade_audit import error_of_kept

from grmpipe.judge.kinds.rule import is_right
from grmpipe.tiny.comparisons import Comparison as Question
from grmpipe.tiny.comparisons import make_comparisons
from grmpipe.tiny.problems import Problem, Split, make_problems
from grmpipe.tiny.resolve import resolve_model
from grmpipe.tiny.tiny_sampler import TinySampler
from grmpipe.tiny.tricks import TRICKS, Trick

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "benchmarks" / "several_judges"
NUM_PROBLEMS = 2048
HELD_OUT_SEED = 90_000
MAX_ANSWER_TOKENS = 64
LAST = 20  # steps
SHARE = ("rollouts", "escalated_share")
# Of Student's t distribution, 97.5 %, by the number of values less one
T_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A run: what is typed, and the problems on which its policy is measured.

    run: the variant whose run this is, if it is a further measurement of it.
    """

    overrides: tuple[str, ...] = ()
    problems: str = "arithmetic"
    run: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Variants with the same prompts, steps and seeds. `start`: the policy that they begin with.

    pairs:    (variant, the variant that it is compared with).
    problems: what the policy is measured on before training.
    """

    start: str
    variants: Mapping[str, Variant]
    pairs: tuple[tuple[str, str], ...]
    problems: tuple[str, ...] = ("arithmetic",)


VOTES = ("min", "median", "majority")
PROBLEMS: Mapping[str, Callable[[Split, int, int], Sequence[Problem | Question]]] = {
    "arithmetic": make_problems,
    "comparison": make_comparisons,
}


def quickstart(*overrides: str, problems: str = "arithmetic") -> Variant:
    """A run with one judge."""
    return Variant(overrides=("+experiment=quickstart", *overrides), problems=problems)


def one_kind(*overrides: str, problems: str = "arithmetic") -> Variant:
    """The policy of the route with one kind of tasks, for as many rollouts of it as beside the other."""
    rollouts = ("train.groups_per_batch=8", "train.num_steps=160")
    return quickstart("policy=tiny_kinds", *rollouts, *overrides, problems=problems)


def alone(trick: Trick) -> Variant:
    """The policy of the jury beside one of its members, for as many steps."""
    return quickstart("policy=tiny_tricks", f"grm=tiny_{trick}", "train.num_steps=160")


def itself(*overrides: str) -> Variant:
    """A policy that judges itself, or is judged as it was."""
    return Variant(overrides=("+experiment=self_rewarding", *overrides))


COMPARISONS = {
    "jury": Comparison(
        start="tiny://policy_tricks",
        variants={
            **{trick: alone(trick) for trick in TRICKS},
            "jury": Variant(overrides=("+experiment=jury",)),
        },
        pairs=tuple(("jury", trick) for trick in TRICKS),
    ),
    "votes": Comparison(
        start="tiny://policy_tricks",
        variants={vote: Variant(overrides=("+experiment=jury", f"reward.vote={vote}")) for vote in VOTES},
        pairs=tuple(("min", vote) for vote in VOTES if vote != "min"),
    ),
    "cascade": Comparison(
        start="tiny://policy",
        variants={
            "good": quickstart(),
            "cascade": Variant(overrides=("+experiment=cascade",)),
        },
        pairs=(("cascade", "good"),),
    ),
    "cascade_learning": Comparison(
        start="tiny://policy",
        variants={
            "good_alone": quickstart(),
            "cheap_frozen": Variant(overrides=("+experiment=cascade_learning", "models.cheap.train.enabled=false")),
            "cheap_learns": Variant(overrides=("+experiment=cascade_learning",)),
        },
        pairs=(("cheap_learns", "good_alone"), ("cheap_learns", "cheap_frozen")),
    ),
    "route": Comparison(
        start="tiny://policy_kinds",
        variants={
            "both_arithmetic": Variant(overrides=("+experiment=route",)),
            "both_comparison": Variant(problems="comparison", run="both_arithmetic"),
            "alone_arithmetic": one_kind(),
            "alone_comparison": one_kind("data=tiny_comparison", "grm=tiny_comparison", problems="comparison"),
        },
        pairs=tuple((f"both_{kind}", f"alone_{kind}") for kind in PROBLEMS),
        problems=("arithmetic", "comparison"),
    ),
    "itself": Comparison(
        start="tiny://policy_judge",
        variants={
            "live": itself("judge.model=policy"),
            "frozen": itself(),
            "three": itself("grm.policy_updates=[20,40,60]"),
        },
        pairs=tuple((name, "live") for name in ("frozen", "three")),
    ),
    "self_judging": Comparison(
        start="tiny://policy_judge",
        variants={
            "learns": Variant(overrides=("+experiment=self_judging",)),
            "own_rollouts": Variant(overrides=("+experiment=self_judging", "algorithm.self_judging.data_path=null")),
            "only_judges": itself("judge.model=policy"),
        },
        pairs=(("learns", "only_judges"), ("own_rollouts", "only_judges")),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A finished run: the share of the problems that its policy gets right, and its summary.json.

    kept_error: of a cascade, the error of its first judge on sure responses that weren't audited.
    last_share: of a cascade, the share of the rollouts that it escalated in the last LAST steps; audits don't count.
    """

    seed: int
    true_accuracy: float
    summary: Mapping[str, Any]
    kept_error: float | None = None
    last_share: float | None = None


def measured(folder: Path, name: str, comparison: Comparison, seed: int, overrides: Sequence[str]) -> Measured:
    """Run the variant unless it is complete, then measure its policy."""
    variant = comparison.variants[name]
    run_dir = folder / f"{variant.run or name}_{seed}"
    if variant.run is None:
        launch(run_dir, [*variant.overrides, f"seed={seed}", *overrides])
    return Measured(
        seed=seed,
        true_accuracy=accuracy(run_dir / "policy", variant.problems, run_dir / f"accuracy_{variant.problems}.json"),
        summary=(summary := json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))),
        kept_error=known_error_of_kept(run_dir) if summary["judging"].get("cascades") else None,
        last_share=share_of_last_steps(run_dir) if summary["judging"].get("cascades") else None,
    )


def share_of_last_steps(run_dir: Path) -> float:
    steps = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    last = [step for step in steps if "time/step_s" in step][-LAST:]
    shares = {f"cascade/reward/{key}": [step.get(f"cascade/reward/{key}", 0.0) for step in last] for key in SHARE}
    rollouts, escalated = shares.values()
    return sum(map(operator.mul, rollouts, escalated)) / sum(rollouts)


def launch(run_dir: Path, overrides: Sequence[str]) -> None:
    """Run launch.py. Exits if the run fails; its output is on the screen."""
    command = [sys.executable, "launch.py", *overrides, "tracking=none", "resume=auto", f"run_dir={run_dir}"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        sys.exit(f"{' '.join(command)} failed")


def accuracy(policy: Path, kind: str, known: Path) -> float:
    """The policy's true accuracy at T = 1 on a row of PROBLEMS, remembered in the file `known`."""
    if not known.exists():
        problems = PROBLEMS[kind]("held_out", NUM_PROBLEMS, HELD_OUT_SEED)
        texts = TinySampler(policy).answer([problem.question for problem in problems], MAX_ANSWER_TOKENS, seed=0)
        rights = [is_right(text, str(problem.answer)) for problem, text in zip(problems, texts, strict=True)]
        known.write_text(json.dumps({"true_accuracy": statistics.fmean(rights)}) + "\n", encoding="utf-8")
    return float(json.loads(known.read_text(encoding="utf-8"))["true_accuracy"])


def known_error_of_kept(run_dir: Path) -> float:
    """What the audit estimates, measured with the second judge, and remembered."""
    known = run_dir / "kept_error.json"
    if not known.exists():
        known.write_text(json.dumps(error_of_kept(run_dir, Path(resolve_model("tiny://grm")))), encoding="utf-8")
    return float(json.loads(known.read_text(encoding="utf-8")))


# -- figures ---------------------------------------------------------------------------------------------------------


def half_width_over_seeds(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of two values or more (Student's t)."""
    return T_QUANTILES[len(values) - 2] * statistics.stdev(values) / sqrt(len(values))


def half_width_of_share(share: float, count: int) -> float:
    """Half of the 95 % interval of a share of `count` problems."""
    return 1.96 * sqrt(share * (1 - share) / count)


def accuracies(runs: Mapping[str, Sequence[Measured]]) -> list[str]:
    seeds = [one.seed for one in next(iter(runs.values()))]
    lines = [f"| judged by | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |", "|---" * (len(seeds) + 2) + "|"]
    for name, some in runs.items():
        values = [one.true_accuracy for one in some]
        cells = [f"{value:.3f} ± {half_width_of_share(value, NUM_PROBLEMS):.3f}" for value in values]
        lines.append(f"| {name} | {' | '.join(cells)} | {interval(values)} |")
    return lines


def differences(runs: Mapping[str, Sequence[Measured]], pairs: Sequence[tuple[str, str]]) -> list[str]:
    lines = ["| difference | by seed | mean |", "|---|---|---|"]
    for name, other in (pair for pair in pairs if runs.keys() >= set(pair)):
        values = [one.true_accuracy - beside.true_accuracy for one, beside in zip(runs[name], runs[other], strict=True)]
        lines.append(f"| {name} - {other} | {', '.join(f'{value:+.3f}' for value in values)} | {interval(values)} |")
    return lines


def interval(values: Sequence[float]) -> str:
    """The mean with its interval over the seeds; of one seed the value alone."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    return f"{statistics.fmean(values):.3f} ± {half_width_over_seeds(values):.3f}"


def by_judge(runs: Mapping[str, Sequence[Measured]]) -> list[str]:
    """What each judge of each run was asked and wrote, from summary.json, as means over the seeds."""
    lines = ["| judged by | judge | asked | tokens |", "|---|---|---|---|"]
    for name, some in runs.items():
        for judge in judges_of(some[0]):
            found = [judges_of(one)[judge] for one in some]
            asked, tokens = (statistics.fmean(one[key] for one in found) for key in ("asked", "tokens"))
            lines.append(f"| {name} | {judge} | {asked:.0f} | {tokens:.0f} |")
    return lines


def judges_of(run: Measured) -> Mapping[str, Any]:
    """The sums of each judge. A run with one judge has only the totals."""
    judging: Mapping[str, Any] = run.summary["judging"]
    return judging.get("by_judge") or {"judge": judging}


def audits(runs: Mapping[str, Sequence[Measured]]) -> list[str]:
    """What each cascade escalated and what its audit found, beside the error of what was kept; empty without one."""
    lines = [
        f"| judged by | seed | escalated | of the last {LAST} steps | audited | estimated error | measured error "
        "| change sides | alarm |",
        "|---" * 9 + "|",
    ]
    for name, some in runs.items():
        for run in some:
            lines += [audit_line(name, run, found) for found in run.summary["judging"].get("cascades", {}).values()]
        errors, shares = (
            [value for run in some if (value := getattr(run, key)) is not None] for key in ("kept_error", "last_share")
        )
        if errors:
            lines.append(f"| {name} | mean | | {interval(shares)} | | | {interval(errors)} | | |")
    return lines if len(lines) > 2 else []


def audit_line(name: str, run: Measured, found: Mapping[str, Any]) -> str:
    estimate = f"{found['audit_error']:.3f} ± {1.96 * found['audit_error_se']:.3f}"
    alarm = any("wrong where it is sure" in alarm for alarm in run.summary["alarms"])
    escalated = [f"{found['escalated_share']:.0%}", f"{run.last_share:.3f}"]
    cells = [name, run.seed, *escalated, found["audited"], estimate, f"{run.kept_error:.3f}"]
    return f"| {' | '.join(map(str, cells))} | {found['flipped_share']:.0%} | {'yes' if alarm else 'no'} |"


def report(
    name: str, start: Mapping[str, float], runs: Mapping[str, Sequence[Measured]], typed: Sequence[str]
) -> list[str]:
    """The report of a comparison. start: accuracy before training, by the kind of problems."""
    before = ", ".join(f"{value:.3f} ({kind})" for kind, value in start.items())
    own = {variant: some for variant, some in runs.items() if COMPARISONS[name].variants[variant].run is None}
    seeds = " ".join(str(one.seed) for one in next(iter(runs.values())))
    return [
        f"# Several judges: {name}",
        "",
        f"`python benchmarks/several_judges.py {' '.join([name, 'runs/several_judges', *typed])} --seeds {seeds}`",
        "",
        f"True accuracy of the trained policy on {NUM_PROBLEMS} held-out problems, T = 1, by a rule that training",
        f"never uses. Before training: {before}. Intervals of 95 %: of a run over the",
        "problems, of a mean over the seeds (Student's t).",
        "",
        *accuracies(runs),
        "",
        *differences(runs, COMPARISONS[name].pairs),
        "",
        *by_judge(own),
        "",
        *audits(own),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("folder", type=Path, help="for the runs; finished ones there are used again")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[], metavar="variant", help="these of the comparison")
    parser.add_argument("overrides", nargs="*", help="of all runs, such as cluster=inprocess")
    args = parser.parse_args()
    if unknown := set(args.only) - COMPARISONS[args.comparison].variants.keys():
        parser.error(f"no variant {', '.join(sorted(unknown))} of {args.comparison}")
    folder, comparison = args.folder.resolve(), COMPARISONS[args.comparison]
    folder.mkdir(parents=True, exist_ok=True)
    runs = {
        name: [measured(folder, name, comparison, seed, args.overrides) for seed in args.seeds]
        for name in args.only or comparison.variants
    }
    policy = Path(resolve_model(comparison.start))
    start = {
        kind: accuracy(policy, kind, folder / f"start_{args.comparison}_{kind}.json") for kind in comparison.problems
    }
    lines = report(args.comparison, start, runs, [*args.overrides, *(["--only", *args.only] if args.only else [])])
    REPORTS.mkdir(exist_ok=True)
    (REPORTS / f"{args.comparison}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
