"""What the quickstart's policy learns, where its time goes, and the gain from overlapping stages.

    python benchmarks/quickstart.py runs/benchmark

1. Seeds 0, 1 and 2 of `launch.py +experiment=quickstart`, one after another, into runs/benchmark/seed<N>; finished
   runs are reused (delete the folder to measure again).
2. The same parts on the same placement, in alternating blocks of steps: the pipeline, and its stages in sequence.

Writes benchmarks/quickstart.md and docs/learning_curve.png.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from in_sequence import STEPS_PER_BLOCK, Rounds, measure, stages_in_sequence, table_of_ways

from grmpipe.config.io.yaml_io import read_yaml
from grmpipe.config.run_config import RunConfig
from grmpipe.observe.journal import read_journal
from grmpipe.run.features.cpu_seconds import cpu_seconds, list_family

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "quickstart.md"
PICTURE = ROOT / "docs" / "learning_curve.png"
SEEDS = (0, 1, 2)
# Commands that start no run, beside what importing torch takes.
SHORT: dict[str, Sequence[str]] = {
    "import torch": ("-c", "import torch"),
    "a refusal: an unknown key": ("launch.py", "+experiment=quickstart", "train.nmsteps=3"),
    "task=doctor": ("launch.py", "task=doctor"),
    "task=plan": ("launch.py", "+experiment=quickstart", "task=plan"),
}
# Of a run, by a word of their command lines; the first that is found names it.
PROCESSES = {
    "launch.py": "driver",
    "fork_server": "imports for all workers",
    "EngineHost": "engines",
    "MemberHost": "learner",
    "ray": "Ray itself",
    "": "others",
}


# -- runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A run seen from outside, in seconds since its process was started."""

    checked_s: float  # configuration, data and models were checked; nothing was started yet
    ready_s: float  # all parts were running
    ended_s: float
    ready_cpu_s: Mapping[str, float]  # CPU seconds until all parts were running, by PROCESSES
    busy_share: float  # of the machine's cores, including other processes, just before the start or after the end
    commit_date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run: its process and its files."""

    run_dir: Path
    process: Process
    summary: Mapping[str, Any]
    steps: Sequence[Mapping[str, float]]  # metrics.jsonl, without the evaluation before the first step
    steps_s: float  # from the beginning of the first step to the end of the last

    def total(self, metric: str) -> float:
        return sum(step[metric] for step in self.steps)

    def median(self, metric: str) -> float:
        return statistics.median(step[metric] for step in self.steps)


def run_seed(folder: Path, seed: int) -> Run:
    """Run the quickstart with this seed, unless a finished run is there."""
    run_dir = folder / f"seed{seed}"
    notes = folder / f"seed{seed}.process.json"
    if not notes.exists():
        process = launch([f"seed={seed}", f"run_dir={run_dir}"], run_dir)
        notes.write_text(json.dumps(dataclasses.asdict(process)), encoding="utf-8")
    return read_run(run_dir, Process(**json.loads(notes.read_text(encoding="utf-8"))))


def launch(overrides: Sequence[str], run_dir: Path) -> Process:
    """Run launch.py. Exits if the run fails; its output is on the screen."""
    busy_before = busy_share_of_cores()
    watched = watch([sys.executable, "launch.py", "+experiment=quickstart", *overrides], ROOT, os.environ)
    return Process(
        checked_s=(run_dir / "config.yaml").stat().st_mtime - watched.began_s,
        ready_s=watched.ready_s,
        ended_s=watched.ended_s,
        ready_cpu_s=watched.ready_cpu_s,
        busy_share=max(busy_before, busy_share_of_cores()),
        commit_date=commit_date(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The times of a command of a run: since the epoch, and in seconds since then."""

    began_s: float
    ready_s: float
    ended_s: float
    ready_cpu_s: Mapping[str, float]


def watch(command: Sequence[str], checkout: Path, environment: Mapping[str, str]) -> Watched:
    """Run the command of a run in a checkout. Exits if it fails; its output is on the screen."""
    began_s, ready_s, ready_cpu_s = time.time(), 0.0, {}
    env = {**environment, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=checkout, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="")
            if "ready after" in line:
                ready_s, ready_cpu_s = time.time() - began_s, cpu_by_process(process.pid)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} in {checkout} ended with code {process.returncode}")
    return Watched(began_s=began_s, ready_s=ready_s, ended_s=time.time() - began_s, ready_cpu_s=ready_cpu_s)


def cpu_by_process(root: int) -> dict[str, float]:
    """CPU seconds of a process and all its descendants that live, by PROCESSES."""
    found = dict.fromkeys(PROCESSES.values(), 0.0)
    for process in list_family([root]):
        with contextlib.suppress(OSError):  # it has ended
            command = Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8")
            found[next(name for word, name in PROCESSES.items() if word in command)] += cpu_seconds([process])
    return found


def busy_share_of_cores(seconds: float = 2.0) -> float:
    """The busy share over the next `seconds`; 0 if the system doesn't report it."""
    before = ticks()
    time.sleep(seconds)
    idle, total = (now - then for now, then in zip(ticks(), before, strict=True))
    return 1 - idle / total if total else 0.0


def ticks() -> tuple[int, int]:
    """Idle and total ticks of all cores since the machine started (proc_stat(5))."""
    path = Path("/proc/stat")
    counts = [int(word) for word in path.read_text().split("\n")[0].split()[1:9]] if path.exists() else [0] * 8
    return counts[3] + counts[4], sum(counts)


def read_run(run_dir: Path, process: Process) -> Run:
    return Run(
        run_dir=run_dir,
        process=process,
        summary=json.loads((run_dir / "summary.json").read_text(encoding="utf-8")),
        steps=[record for record in read_journal(run_dir / "metrics.jsonl") if "time/step_s" in record],
        steps_s=span_of_steps_s(json.loads((run_dir / "timeline.json").read_text(encoding="utf-8"))),
    )


def span_of_steps_s(events: Iterable[Mapping[str, Any]]) -> float:
    """The time of a step: the learner's span "step N", then the weight sync's "version N"."""
    spans = [event for event in events if event["ph"] == "X" and re.fullmatch(r"(step|version) \d+", event["name"])]
    return (max(span["ts"] + span["dur"] for span in spans) - min(span["ts"] for span in spans)) / 1e6


# -- tables --------------------------------------------------------------------------------------------------------


Row = tuple[str, str, Callable[[Run], float]]  # label, format, value


def evaluation(when: str, metric: str) -> Callable[[Run], float]:
    return lambda run: run.summary["eval"][when][metric]


def busy_share(role: str) -> Callable[[Run], float]:
    return lambda run: run.summary["busy_s"][role] / run.steps_s


def step_share(metric: str) -> Callable[[Run], float]:
    return lambda run: run.total(metric) / run.total("time/step_s")


def ready_cpu(name: str) -> Callable[[Run], float]:
    return lambda run: run.process.ready_cpu_s[name]


LEARNING: tuple[Row, ...] = (
    ("true accuracy at T = 1, before", ".3f", evaluation("initial", "true_accuracy")),
    ("true accuracy at T = 1, after", ".3f", evaluation("final", "true_accuracy")),
    ("true accuracy, greedy, before", ".3f", evaluation("initial", "true_accuracy_greedy")),
    ("true accuracy, greedy, after", ".3f", evaluation("final", "true_accuracy_greedy")),
    ("GRM score (1 to 10), before", ".2f", evaluation("initial", "grm_score")),
    ("GRM score (1 to 10), after", ".2f", evaluation("final", "grm_score")),
)
WALL: tuple[Row, ...] = (
    ("command to exit, s", ".1f", lambda run: run.process.ended_s),
    ("start-up: command to ready, s", ".1f", lambda run: run.process.ready_s),
    ("of it: imports, configuration, data and models checked, s", ".1f", lambda run: run.process.checked_s),
    ("of it: processes started, models loaded, s", ".1f", lambda run: run.process.ready_s - run.process.checked_s),
    *((f"CPU seconds until ready: {name}", ".1f", ready_cpu(name)) for name in PROCESSES.values()),
    ("all steps, s", ".1f", lambda run: run.steps_s),
    ("one step (mean), s", ".3f", lambda run: statistics.fmean(step["time/step_s"] for step in run.steps)),
    ("one step (median), s", ".3f", lambda run: run.median("time/step_s")),
)
STAGES: tuple[Row, ...] = (
    ("policy: a rollout in flight", ".0%", busy_share("policy")),
    ("GRM: a judgement in flight", ".0%", busy_share("grm")),
    ("learner: in its calls", ".0%", busy_share("learner")),
    ("held-out evaluations, between the steps", ".0%", lambda run: 1 - run.total("time/step_s") / run.steps_s),
    (
        "learner waits for groups, share of the steps without evaluations",
        ".0%",
        step_share("stall/groups_s"),
    ),
    ("no rollout in flight, admission closed, share of them", ".0%", step_share("stall/engines_idle_s")),
    ("weight syncs, share of them", ".1%", step_share("sync/push_s")),
    ("one weight sync (median), ms", ".0f", lambda run: 1e3 * run.median("sync/push_s")),
    ("of it: generation paused (median), ms", ".0f", lambda run: 1e3 * run.median("sync/pause_s")),
)


def table(rows: Sequence[Row], runs: Sequence[Run]) -> list[str]:
    """One column per run, and their median."""
    lines = [f"| | {' | '.join(run.run_dir.name for run in runs)} | median |", "|---" * (len(runs) + 2) + "|"]
    for label, form, value in rows:
        values = [value(run) for run in runs]
        cells = [format(number, form) for number in (*values, statistics.median(values))]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


# -- report --------------------------------------------------------------------------------------------------------


def report(runs: Sequence[Run], rounds: Rounds, busy_share: float, short_commands: Sequence[str]) -> list[str]:
    others = ", ".join(f"{share:.0%}" for share in (*(run.process.busy_share for run in runs), busy_share))
    commits = " and ".join(sorted({run.process.commit_date for run in runs} | {commit_date()}))
    return [
        "# Quickstart",
        "",
        "`python benchmarks/quickstart.py runs/benchmark`: default settings on Ray, local models, W&B offline.",
        f"{machine()}; code of {commits}.",
        f"Other work on the cores, right before or after each measurement: {others}.",
        "Seconds are noisy, also on a machine that seems idle: use the medians and the ratios, and measure on yours.",
        "",
        "## Learning",
        "",
        "![The learning curve](../docs/learning_curve.png)",
        "",
        "Held-out problems, one column per seed. Training never uses the rule behind the true accuracy.",
        "",
        *table(LEARNING, runs),
        "",
        "## Time",
        "",
        *table(WALL, runs),
        "",
        "Commands that start no run, beside an import of torch (medians):",
        "",
        *short_commands,
        "",
        "Time of the steps by stage. `In flight` is not compute time: on few cores the stages share them.",
        "",
        *table(STAGES, runs),
        "",
        "## The pipeline compared with its stages in sequence",
        "",
        "In sequence: all rollouts of a batch, then all judgements, then all micro-batches and the step, then the",
        "weight sync, with the engines, judge, learner and placement of the pipeline. All variants alternate in one",
        f"process: {len(rounds)} rounds of {STEPS_PER_BLOCK} steps each. A block has one more step at either end, "
        "where",
        "the pipeline fills and drains; these are not counted.",
        "",
        *table_of_ways(rounds),
        "",
        f"In sequence a step is: {stages_in_sequence(rounds)} (medians).",
    ]


def time_short_commands(repeats: int = 5) -> list[str]:
    """A table of the medians of SHORT, in seconds; each repeat runs all of them in turn."""
    taken: dict[str, list[float]] = {name: [] for name in SHORT}
    for _, (name, arguments) in itertools.product(range(repeats), SHORT.items()):
        began_s = time.monotonic()
        subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True)
        taken[name].append(time.monotonic() - began_s)
    return ["| command | s |", "|---|---|", *(f"| {name} | {statistics.median(s):.2f} |" for name, s in taken.items())]


def machine() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8")) if info.exists() else None
    return f"{os.cpu_count()} cores ({found[1] if found else 'CPU unknown'})"


def commit_date() -> str:
    command = ["git", "log", "-1", "--format=%cd", "--date=format:%Y-%m-%d %H:%M"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def quiet(config: RunConfig) -> RunConfig:
    """The run's configuration without console and tracking."""
    tracking = dataclasses.replace(config.tracking, trackers=[], console=False)
    return dataclasses.replace(config, tracking=tracking)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; finished ones there are used again")
    parser.add_argument("--rounds", type=int, default=5, help="of the pipeline and of its stages in sequence")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    runs = [run_seed(folder, seed) for seed in SEEDS]
    short_commands, busy_before = time_short_commands(), busy_share_of_cores()
    with tempfile.TemporaryDirectory() as directory:
        rounds = asyncio.run(measure(quiet(read_yaml(runs[0].run_dir / "config.yaml")), Path(directory), args.rounds))
    busy_share = max(busy_before, busy_share_of_cores())
    plot = [sys.executable, "benchmarks/plot_learning_curve.py", *(str(run.run_dir) for run in runs)]
    subprocess.run([*plot, "--out", str(PICTURE)], cwd=ROOT, check=True)
    lines = report(runs, rounds, busy_share, short_commands)
    REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
