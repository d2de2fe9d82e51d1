"""Accuracy of the simulator: steps of the quickstart on this machine, compared with predictions from profiles of other
placements.

    python benchmarks/simulator.py runs/simulator            # 3 rounds of 5 short runs on Ray, then the report
    python benchmarks/simulator.py runs/simulator --rounds 0 # only the report, from existing runs

--profiled names the placements whose profiles predict the others; by default all measured ones.

Each round runs every placement once, so that a slow minute of the machine affects all equally. Finished runs are reused
(delete a folder to measure again). Writes benchmarks/simulator.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from quickstart import busy_share_of_cores

from grmpipe.capacity.plan.beliefs import profile_of
from grmpipe.capacity.plan.survey import Survey, survey_run
from grmpipe.capacity.simulate.simulated_cluster import SimulatedRun, simulate
from grmpipe.capacity.simulate.simulation import stated_or_reckoned, workload_of
from grmpipe.config.run_config import RunConfig
from grmpipe.config.yaml_io import read_yaml

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "simulator.md"
TARGET = 0.15
NUM_STEPS = 16
FILLING, DRAINING = 4, 2  # steps at either end that aren't counted
SIMULATED_STEPS = 16

FOUR = "judge.num_judgements=4"
SYNCHRONOUS = "train.max_staleness=0"
TWO_EACH = (
    "placement=two_ranks", "placement.roles.learner.replicas=1", "placement.roles.policy.replicas=2",
    "placement.roles.grm.replicas=2",
)  # fmt: skip
PLACEMENTS: Mapping[str, tuple[str, ...]] = {
    "laptop": (),
    "laptop, synchronous": (SYNCHRONOUS,),
    "laptop, 4 judgements": (FOUR,),
    "laptop, 4 judgements, synchronous": (FOUR, SYNCHRONOUS),
    "two engines of each role": TWO_EACH,
    "two engines of each role, synchronous": (*TWO_EACH, SYNCHRONOUS),
    "two engines of each role, 4 judgements": (*TWO_EACH, FOUR),
    "elastic": ("placement=elastic",),
}
FIRST = tuple(PLACEMENTS)[:5]  # measured by default
QUIET, QUIET_LOOKS = 0.1, 5  # share of all cores; checks of two seconds
OTHERS = "others.json"  # next to a run's files: the share of all cores that was busy just before it


# -- measuring -------------------------------------------------------------------------------------------------------


def run_once(name: str, run_dir: Path) -> None:
    """Run a placement. Exits if the run fails; its output is on the screen."""
    if completed(run_dir):
        return
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [
        f"train.num_steps={NUM_STEPS}", "data.eval_path=null", "objective=wall_s", "tracking=none",
        f"run_dir={run_dir}", *PLACEMENTS[name],
    ]  # fmt: skip
    command = [sys.executable, "launch.py", "+experiment=quickstart", *overrides]
    busy = when_quiet()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}")
    (run_dir / OTHERS).write_text(json.dumps({"busy_share": round(busy, 3)}), encoding="utf-8")


def when_quiet() -> float:
    """Wait for the processes of the last run to end. Returns the share of all cores that is busy then, by any
    process.
    """
    for _ in range(QUIET_LOOKS):
        if (busy := busy_share_of_cores()) <= QUIET:
            break
    return busy


def measured_s(run_dir: Path) -> float:
    """The mean step between filling and draining. A mean: steps of a stale run alternate between long and short."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    times = [line["time/step_s"] for line in lines if "time/step_s" in line]
    return statistics.fmean(times[FILLING:-DRAINING])


def others_share(run_dir: Path) -> float:
    """The share of all cores just before the run; 0 if not measured."""
    path = run_dir / OTHERS
    return json.loads(path.read_text(encoding="utf-8"))["busy_share"] if path.exists() else 0.0


def runs_of(folder: Path, name: str) -> dict[int, Path]:
    """Round -> run."""
    found = sorted(folder.glob(f"{slug(name)}-[0-9]*"))
    return {int(run_dir.name.rsplit("-", 1)[1]): run_dir for run_dir in found if completed(run_dir)}


def completed(run_dir: Path) -> bool:
    summary = run_dir / "summary.json"
    return summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "completed"


def slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


# -- prediction ----------------------------------------------------------------------------------------------------


def foretold(run_dir: Path, profile_dir: Path) -> SimulatedRun:
    """A simulation of that run, by the costs and lengths of another."""
    survey = survey_of(run_dir, profile_dir)
    profile = profile_of(survey)
    costs = stated_or_reckoned(survey, profile)
    return simulate(workload_of(survey, profile), survey.placement, costs, SIMULATED_STEPS)


@lru_cache
def survey_of(run_dir: Path, profile_dir: Path) -> Survey:
    config: RunConfig = read_yaml(run_dir / "config.yaml")
    plan, simulated = replace(config.plan, profile=str(profile_dir)), replace(config.simulate, lengths=str(profile_dir))
    return survey_run(replace(config, plan=plan, simulate=simulated), lambda what, share: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A placement: the times of its runs, and the predictions from the profiles of each of the others."""

    name: str
    measured: Mapping[int, float]  # round -> seconds
    foretold: Mapping[str, Mapping[int, float]]  # placement profiled in the same round -> round -> seconds
    others: float = 0.0  # the largest share of all cores that was busy before its runs

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured.values())

    @property
    def spread(self) -> float:
        """Between its slowest and its fastest run, over its median."""
        return (max(self.measured.values()) - min(self.measured.values())) / self.seconds

    def foretold_s(self, profiled: str) -> float:
        return statistics.median(self.foretold[profiled].values())

    def errors(self, profiled: str) -> list[float]:
        """Relative errors by round, smallest first."""
        return sorted(predicted_s / self.measured[turn] - 1 for turn, predicted_s in self.foretold[profiled].items())

    def error(self, profiled: str) -> float:
        return statistics.median(self.errors(profiled))


def rows_of(folder: Path, profiled: Sequence[str]) -> list[Row]:
    rows = []
    for name in PLACEMENTS:
        if runs := runs_of(folder, name):
            row = Row(
                name=name,
                measured={turn: measured_s(run) for turn, run in runs.items()},
                foretold={
                    other: predictions
                    for other in profiled
                    if other != name and (predictions := foretold_by(runs, runs_of(folder, other)))
                },
                others=max(map(others_share, runs.values())),
            )
            rows.append(row)
            print(row, flush=True)
    return rows


def foretold_by(runs: Mapping[int, Path], profiles: Mapping[int, Path]) -> dict[int, float]:
    """The predictions of the rounds in which both were run."""
    return {turn: foretold(run, profiles[turn]).step_s for turn, run in runs.items() if turn in profiles}


# -- report --------------------------------------------------------------------------------------------------------


HEADING = """# Accuracy of the simulator

`{command}`: {placements} placements of the quickstart on Ray with embedded engines, {cores} cores,
{runs} rounds in which each is run once, {steps} steps. A step is the mean of a run without its first {filling} and last
{draining} steps; of the rounds, the median. It is predicted as by `task=simulate`, with costs and lengths of a run of
*another* placement in the same round (`plan.profile` and `simulate.lengths`): nothing was fitted to the run it is
compared with. Each prediction has its error and, in brackets, the range of the error over the rounds.

"Laptop" is the quickstart as it is: the learner, one engine of the policy, one of the GRM; staleness 1, one judgement
per rollout. "Two engines of each role": two of the policy, two of the GRM, and the learner.
"""


OUTSIDE = """## Errors of profiles, and their causes

A profile contains only costs that its run can separate (docs/planning.md).

- *4 judgements* at staleness 1 keeps the GRM's batch full: every step admits rows, and batches never differ in size.
  The costs of a row, of a prompt and of admitting a row can't be separated there. The embedded engine has a separate
  pass for admission, whose cost is attributed to prompts. That is too high where many rows join at once.
  Synchronous, the same placement has batches of all sizes, and its profile is nearly right.
- *Two engines of each role* are five processes and the driver on two cores. They took a quarter to a third more CPU
  seconds for the same judgements and rollouts. Smaller batches explain one part, switching
  ([turns.md](turns.md)) another; the rest makes its profile too expensive for placements with fewer processes.

Use a profile of a run whose engines aren't always full, with about as many processes as cores.
"""


def report(rows: Sequence[Row], profiled: Sequence[str], command: str) -> str:
    heading = HEADING.format(
        command=command,
        runs=max(len(row.measured) for row in rows),
        steps=NUM_STEPS,
        placements=len(rows),
        cores=os.cpu_count(),
        filling=FILLING,
        draining=DRAINING,
    )
    return "\n".join([heading, table(rows, profiled), "", verdicts(rows, profiled), "", noise(rows), "", OUTSIDE])


def noise(rows: Sequence[Row]) -> str:
    """The machine's own variation."""
    widest, usual = max(rows, key=lambda row: row.spread), statistics.median(row.spread for row in rows)
    return (
        f"The machine is shared. Runs of one placement differ by {usual:.0%} in "
        f"the median, by {widest.spread:.0%} at most ({widest.name}); the table shows the load of other processes "
        "right before a run."
    )


def table(rows: Sequence[Row], profiled: Sequence[str]) -> str:
    heads = [f"predicted by the profile of: {name}" for name in profiled]
    lines = [
        f"| placement | measured, s per step | lowest, highest run | other load before it, at most "
        f"| {' | '.join(heads)} |",
        "|---|---|---|---|" + "---|" * len(profiled),
    ]
    for row in rows:
        cells = [cell(row, name) for name in profiled]
        ends = f"{min(row.measured.values()):.3f}, {max(row.measured.values()):.3f}"
        lines.append(f"| {row.name} | {row.seconds:.3f} | {ends} | {row.others:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(row: Row, profiled: str) -> str:
    if profiled not in row.foretold:
        return "(itself)" if profiled == row.name else "-"
    errors = row.errors(profiled)
    return f"{row.foretold_s(profiled):.3f}, {row.error(profiled):+.0%} ({errors[0]:+.0%} to {errors[-1]:+.0%})"


def verdicts(rows: Sequence[Row], profiled: Sequence[str]) -> str:
    lines = []
    for name in profiled:
        predicted = [row for row in rows if name in row.foretold]
        inside = sum(abs(row.error(name)) <= TARGET for row in predicted)
        pairs = [*itertools.combinations(predicted, 2)]
        apart = [pair for pair in pairs if can_be_told_apart(*pair)]
        kept = sum((a.seconds < b.seconds) == (a.foretold_s(name) < b.foretold_s(name)) for a, b in apart)
        lines.append(
            f"- By the profile of {name}: {inside} of {len(predicted)} within {TARGET:.0%}; of the {len(apart)} pairs "
            f"of which every run of one was faster than any of the other, {kept} are predicted in their order."
        )
    return "\n".join(lines)


def can_be_told_apart(a: Row, b: Row) -> bool:
    """Whether every run of one was faster than any of the other."""
    of_a, of_b = a.measured.values(), b.measured.values()
    return max(of_a) < min(of_b) or max(of_b) < min(of_a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(FIRST), help="placements to measure")
    parser.add_argument("--measure-only", action="store_true", help="no report")
    parser.add_argument("--profiled", nargs="*", default=list(FIRST))
    args = parser.parse_args()
    for turn in range(args.rounds):
        for name in args.only:
            run_once(name, args.folder.absolute() / f"{slug(name)}-{turn}")
    if args.measure_only:
        return
    rows = rows_of(args.folder.absolute(), args.profiled)
    text = report(rows, args.profiled, f"python benchmarks/simulator.py {args.folder}")
    REPORT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
