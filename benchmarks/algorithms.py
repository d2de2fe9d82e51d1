"""Compares estimators, losses and corrections on the tiny task with the same budget.

    python benchmarks/algorithms.py run runs/algorithms                     # every missing row and seed
    python benchmarks/algorithms.py run runs/algorithms --rows "grpo x gspo" --seeds 0 --minutes 4
    python benchmarks/algorithms.py report runs/algorithms

Runs one after another in this process, on one core: `+experiment=quickstart cluster=inprocess`, STEPS steps of GROUPS
groups. Each result is appended to results.jsonl. The report, benchmarks/algorithms.md, is made from those lines. Tunes
nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "algorithms.md"
SEEDS = (0, 1)
STEPS = 24
GROUPS = 8
HELD_OUT = 256
BUDGET = (
    "+experiment=quickstart", "cluster=inprocess", "tracking=none", "tracking.console=false", "judge_monitor.every=0",
    f"train.num_steps={STEPS}", f"train.groups_per_batch={GROUPS}", "train.checkpoint_every=0",
    f"data.num_eval_prompts={HELD_OUT}", f"evaluate.every={STEPS}",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    overrides: tuple[str, ...]


# -- what is run ---------------------------------------------------------------------------------------------------


ESTIMATORS = ("grpo", "dr_grpo", "rloo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline", "gae")
CRITIC = ("critic=policy", "algorithm.gamma=1", "algorithm.gae_lambda=1")  # for gae: a third trained model
# Against the sampler, one version behind, so that a ratio is not 1 in the only update of a batch.
BEHIND = ("algorithm.proximal=sampler", "algorithm.correction=none")
LOSSES: dict[str, tuple[str, ...]] = {
    "ppo_clip": ("algorithm=grpo", *BEHIND),
    "dual_clip": ("algorithm=dual_clip", *BEHIND),
    "gspo": ("algorithm=gspo", *BEHIND),
    "cispo": ("algorithm=cispo", *BEHIND),
    "sapo": ("algorithm=sapo", *BEHIND),
    "policy_gradient": ("algorithm=policy_gradient",),
}
GRID = {
    (estimator, loss): Row(
        name=f"{estimator} x {loss}",
        overrides=(
            *overrides,
            f"algorithm.estimator={estimator}",
            "train.max_staleness=1",
            *(CRITIC if estimator == "gae" else ()),
        ),
    )
    for loss, overrides in LOSSES.items()
    for estimator in ESTIMATORS
}


def of_files(*names: str, also: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """Rows that are files of conf/algorithm, or several files joined by +."""
    return tuple(Row(name=name, overrides=(f"algorithm=[{name.replace('+', ',')}]", *also)) for name in names)


CORRECTIONS = tuple(
    Row(name=f"stale: {row.name}", overrides=row.overrides)
    for row in of_files(
        "grpo", "ppo_sampler", "sequence_tis", "sequence_mis", "icepop", "grpo+geometric", "grpo+veto",
        "grpo+off_policy_mask", "decoupled_ppo", "decoupled_ppo_interpolated", also=("train.max_staleness=4",)
    )
)  # fmt: skip
WHOLE = tuple(
    Row(name=f"file: {row.name}", overrides=row.overrides) for row in of_files("dapo", "dr_grpo", "rloo", "raft", "dpo")
)
ROWS = (*GRID.values(), *CORRECTIONS, *WHOLE)


# -- runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run. Accuracies are those of the hidden rule on held-out problems."""

    row: str
    seed: int
    before: float  # sampled at T = 1
    after: float
    after_greedy: float
    grm_score: float  # after, 1 to 10
    step_s: float  # median
    learner_s: float  # of a step, median
    clip_share: float  # of tokens, mean over the steps
    steps: int
    dropped: dict[str, int]
    load: float  # of the machine, one minute's mean at the end


def run(row: Row, seed: int, folder: Path) -> Result:
    """Run a row with a seed. Raises RunFailed if the run fails."""
    # Late: a report doesn't need them.
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore

    from grmpipe import tasks
    from grmpipe.config.io.yaml_io import build, schema

    run_dir = folder / f"{row.name.replace(' ', '_').replace(':', '')}-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)  # of an interrupted run
    ConfigStore.instance().store(name="schema", node=schema())
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose("config", [*BUDGET, f"seed={seed}", f"run_dir={run_dir}", *row.overrides])
    tasks.run_task(build(composed))
    return read_run(run_dir, row, seed)


def read_run(run_dir: Path, row: Row, seed: int) -> Result:
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [step for step in map(json.loads, lines) if "time/step_s" in step]
    first, last = summary["eval"]["initial"], summary["eval"]["final"]
    return Result(
        row=row.name,
        seed=seed,
        before=first["true_accuracy"],
        after=last["true_accuracy"],
        after_greedy=last["true_accuracy_greedy"],
        grm_score=last["grm_score"],
        step_s=statistics.median(step["time/step_s"] for step in steps),
        learner_s=statistics.median(step["time/train_s"] for step in steps),
        clip_share=statistics.fmean(step["train/clip_share"] for step in steps),
        steps=summary["steps"],
        dropped=summary["groups"]["dropped"],
        load=os.getloadavg()[0],
    )


def results_in(folder: Path) -> list[Result]:
    path = folder / "results.jsonl"
    if not path.exists():
        return []
    found = [Result(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({(result.row, result.seed): result for result in found}.values())  # of a repeated run, the last result


def run_missing(folder: Path, names: Sequence[str], seeds: Sequence[int], minutes: float = math.inf) -> None:
    """Run the missing rows of a seed, then of the next seed. Begins no run after this many minutes."""
    rows = [row for row in ROWS if not names or row.name in names]
    if unknown := set(names) - {row.name for row in rows}:
        sys.exit(f"no such rows: {', '.join(sorted(unknown))}")
    folder.mkdir(parents=True, exist_ok=True)
    done = {(result.row, result.seed) for result in results_in(folder)}
    ends_s = time.monotonic() + 60 * minutes
    for seed in seeds:
        for row in rows:
            if (row.name, seed) in done or time.monotonic() > ends_s:
                continue
            result = run(row, seed, folder)
            with (folder / "results.jsonl").open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(result)) + "\n")


# -- report --------------------------------------------------------------------------------------------------------


Figure = Callable[[Result], float]


def by_seed(results: Sequence[Result], row: Row) -> list[Result]:
    return sorted((result for result in results if result.row == row.name), key=lambda result: result.seed)


def cell(results: Sequence[Result], figure: Figure, form: str) -> str:
    """The figures of all seeds in one cell."""
    return ", ".join(format(figure(result), form) for result in results)


def crossed(results: Sequence[Result], figure: Figure, form: str) -> list[str]:
    """One row per estimator, one column per loss, and each seed in a cell; the margins are means."""
    ran = [[by_seed(results, GRID[estimator, loss]) for loss in LOSSES] for estimator in ESTIMATORS]
    lines = [f"| | {' | '.join(LOSSES)} | mean |", "|---" * (len(LOSSES) + 2) + "|"]
    for estimator, cells in zip(ESTIMATORS, ran, strict=True):
        row_cells = [cell(found, figure, form) for found in cells]
        lines.append(f"| {estimator} | {' | '.join(row_cells)} | {mean_of(cells, figure, form)} |")
    columns = [mean_of(column, figure, form) for column in zip(*ran, strict=True)]
    everything = mean_of([found for cells in ran for found in cells], figure, form)
    return [*lines, f"| mean | {' | '.join(columns)} | {everything} |"]


def mean_of(cells: Iterable[Sequence[Result]], figure: Figure, form: str) -> str:
    values = [figure(result) for found in cells for result in found]
    return format(statistics.fmean(values), form) if values else ""


def spread_of_seeds(results: Sequence[Result], figure: Figure) -> float:
    """The standard deviation of single runs, pooled over the pairs of seeds of the grid; nan without a pair."""
    pairs = [by_seed(results, row)[:2] for row in GRID.values()]
    squares = [(figure(one) - figure(other)) ** 2 / 2 for one, other in (pair for pair in pairs if len(pair) == 2)]
    return math.sqrt(statistics.fmean(squares)) if squares else math.nan


def listed(rows: Sequence[Row], results: Sequence[Result]) -> list[str]:
    """One line per row that was run."""
    lines = ["| row | T = 1, after | greedy, after | GRM score | step, s |", "|---" * 5 + "|"]
    for row in rows:
        if found := by_seed(results, row):
            lines.append(
                f"| {row.name.partition(': ')[2]} | {cell(found, lambda r: r.after, '.3f')} "
                f"| {cell(found, lambda r: r.after_greedy, '.3f')} | {mean_of([found], lambda r: r.grm_score, '.2f')} "
                f"| {cell(found, lambda r: r.step_s, '.2f')} |"
            )
    return lines if len(lines) > 2 else []


def paragraph(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def introduction(results: Sequence[Result]) -> list[str]:
    before, loads = [result.before for result in results], [result.load for result in results]
    return [
        *paragraph(f"""
            `python benchmarks/algorithms.py run runs/algorithms`, then `report`: the quickstart with one generative
            judge, {STEPS} steps of {GROUPS} groups x 8, one process on one core. The same for all: lr 3e-4, one
            update per batch, at most one version behind; the rest is from conf/algorithm. Nothing was tuned.
        """),
        "",
        *paragraph(f"""
            True accuracy is that of {HELD_OUT} held-out problems; before the first step it is {min(before):.3f} to
            {max(before):.3f} at T = 1. The machine had other load ({min(loads):.1f} to
            {max(loads):.1f} on {os.cpu_count()} cores): compare seconds with care.
        """),
    ]


def noise(results: Sequence[Result]) -> list[str]:
    spread = spread_of_seeds(results, lambda result: result.after)
    sampling = math.sqrt(0.25 / HELD_OUT)
    return paragraph(f"""
        **Noise.** {HELD_OUT} problems alone give an accuracy a standard deviation of up to {sampling:.3f}.
        Between the two seeds of a cell it is {spread:.3f} (pooled): this table can't separate rows that differ by
        less than {2 * spread:.2f}. The cells of a row share their seeds, and mostly their gradients: a row's mean
        is hardly better known than one of its cells.
    """)


SAME = """\
Left out as duplicates: `gspo_token` equals `gspo` if all tokens of a sample have the same advantage, and `process` and
`process_grpo` equal `grpo` if a rollout has one reward; the quickstart's judge gives one. So do `gigpo` and `mt_grpo`
if a rollout has one turn; `gae_turns` is `gae` there. `gae_raw` is `gae` without whitening over
the batch. `gae` uses a critic, a third model that learns; its seconds include the critic. `rloo` is `dr_grpo` times
8 / 7, and Adam is nearly invariant to a factor.

The ratio losses take their ratio against the sampler, a version behind (`proximal: sampler`); with a recomputed
proximal policy and one update per batch the ratio would be 1, and all of them the same. `policy_gradient` has no ratio:
it is corrected by TIS instead. One version behind hardly any token exceeds a clip of 0.2: all columns but `gspo` have
nearly the same gradient here, and differ by chance. GSPO's band of 3e-4 is narrower than the change of a sample's ratio
in a step at this lr, so it clips much; nothing was tuned to avoid that.""".splitlines()


def report(results: Sequence[Result], trl: Sequence[str] = ()) -> list[str]:
    lines = ["# Algorithms", "", *introduction(results), "", "## Estimators x losses", ""]
    lines += ["True accuracy after the last step, sampled at T = 1, one figure per seed:", ""]
    lines += [*crossed(results, lambda result: result.after, ".3f"), ""]
    if any(len(by_seed(results, row)) < len(SEEDS) for row in GRID.values()):
        lines += ["A cell with one figure was run with the first seed alone: compare columns seed by seed.", ""]
    lines += [*noise(results), "", *SAME, ""]
    lines += ["Greedy:", "", *crossed(results, lambda result: result.after_greedy, ".3f"), ""]
    lines += ["Seconds per step (median of a run):", "", *crossed(results, lambda result: result.step_s, ".2f"), ""]
    lines += [
        "Share of tokens that the loss clips:",
        "",
        *crossed(results, lambda result: result.clip_share, ".3f"),
        "",
    ]
    for title, rows in (
        ("Algorithms as in their files", WHOLE),
        ("Corrections, with GRPO, up to four versions behind", CORRECTIONS),
    ):
        if table := listed(rows, results):
            lines += [f"## {title}", "", *table, ""]
    dropped = [f"{result.row} (seed {result.seed}): {result.dropped}" for result in results if result.dropped]
    if dropped:
        lines += ["Groups dropped, by cause: " + "; ".join(dropped) + ".", ""]
    return [*lines, *trl][:-1]


def beside_trl(folder: Path) -> list[str]:
    """The findings of losses_of_trl.py, if it was run."""
    path = folder / "trl.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    return [
        f"## Losses compared with TRL {found['trl']}'s",
        "",
        "`python benchmarks/losses_of_trl.py runs/algorithms`: the same log-probs through both, float64, 20 random",
        "batches of 8 samples. The largest difference of the loss, and of its gradient with respect to a token's "
        "log-prob:",
        "",
        "| loss | difference |",
        "|---|---|",
        *(f"| {name} | {gap:.0e} |" for name, gap in found["largest_difference"].items()),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("folder", type=Path, help="for the runs and results.jsonl; finished rows there aren't repeated")
    parser.add_argument("--rows", nargs="*", default=[], help="by name; all if none is named")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="after that no other run starts")
    args = parser.parse_args()
    folder = args.folder.resolve()
    if args.what == "run":
        run_missing(folder, args.rows, args.seeds, args.minutes)
    else:
        lines = report(results_in(folder), beside_trl(folder))
        REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
