"""Signals at each stage of a run: how it ends, after how long, with which files, and what is left of it.

    python benchmarks/stopping.py [--signals TERM INT HUP] [--stages training] [--ways process group all]
                                 [--clusters inprocess ray] [--times 1 2]

`process`: to the command alone; `group`: to its process group, as `timeout` and a terminal send it; `all`: to all
processes of the run, whatever their group, as systemd's stop does. Twice: the second one a second after the first.
Writes a row for each case to benchmarks/stopping.md. Exit code 1 if a case ended otherwise than
docs/checkpoints.md says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.process_faults import MARK, find_marked

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "stopping.md"
SMALL = (
    "+experiment=quickstart", "run_dir=run", "tracking=none", "train.groups_per_batch=2", "train.group_size=2",
    "judge_monitor.every=0", "judge_monitor.anchors=4",
)  # fmt: skip
ENDS_WITHIN_S = {1: 15.0, 2: 5.0}  # by number of signals
LEFT_FOR_S = 3.0  # a process may be there after the command: killed, and not yet gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    stage: str
    number: signal.Signals
    way: str
    cluster: str
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """code: the exit code. took_s: from the first signal. status: of summary.json; empty without. steps: that were
    done. checkpoint: the name of the last one. left: processes and temporary files.
    """

    code: int
    took_s: float
    status: str
    steps: int
    checkpoint: str
    left: list[str]


class Command:
    """The command in a folder of its own, in a session of its own."""

    def __init__(self, folder: Path, cluster: str, *overrides: str) -> None:
        self.run_dir, self.folder, self._mark = folder / "run", folder, folder.name
        environment = os.environ | {MARK: self._mark, "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"}
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "launch.py"), *SMALL, f"cluster={cluster}", *overrides],
                cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    @property
    def steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def takes_signals(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1)

    def send(self, number: signal.Signals, way: str) -> None:
        if way == "process":
            self.process.send_signal(number)
        elif way == "group":
            os.killpg(self.process.pid, number)
        else:
            for process, _ in find_marked(self._mark):
                os.kill(process, number)

    def find_left(self) -> list[str]:
        """What is there after the end, once killed processes have had time to go."""
        until_s = time.monotonic() + LEFT_FOR_S
        while (left := [command for _, command in find_marked(self._mark)]) and time.monotonic() < until_s:
            time.sleep(0.1)
        names = [command.split(b"\0")[0].decode() for command in left]
        return names + [path.name for path in self.folder.glob("grmpipe-*")]


def has_file(name: str) -> Callable[[Command], bool]:
    return lambda command: (path := command.run_dir / name).exists() and path.stat().st_size > 0


def has_answer_after_step_2(command: Command) -> bool:
    path = command.run_dir / "eval_rollouts.jsonl"
    return path.exists() and b'"step":2,' in path.read_bytes()


# stage -> whether it has begun, and what makes it long enough
STAGES: dict[str, tuple[Callable[[Command], bool], tuple[str, ...]]] = {
    "composing": (Command.takes_signals, ()),
    "checking": (lambda command: any((command.folder).glob("run/.lock")) or has_file("config.yaml")(command), ()),
    "starting": (has_file("run.log"), ()),
    "first evaluation": (has_file("eval_rollouts.jsonl"), ("data.num_eval_prompts=400",)),
    "training": (lambda command: command.steps >= 2, ("train.num_steps=10000", "data.num_eval_prompts=4")),
    "last evaluation": (has_answer_after_step_2, ("train.num_steps=2", "data.num_eval_prompts=400")),
    # The line of the last step is written once the last evaluation is in it.
    "last checkpoint": (lambda command: command.steps >= 2, ("train.num_steps=2", "data.num_eval_prompts=200")),
    "ending": (has_file("policy/config.json"), ("train.num_steps=2", "data.num_eval_prompts=4")),
}


def try_case(case: Case) -> End:
    reached, overrides = STAGES[case.stage]
    folder = Path(tempfile.mkdtemp(prefix="sig"))  # short: sockets are in it
    command = Command(folder, case.cluster, *overrides)
    try:
        until_s = time.monotonic() + 240
        while not reached(command):
            assert command.process.poll() is None and time.monotonic() < until_s, command.output
            time.sleep(0.01)
        began_s = time.monotonic()
        command.send(case.number, case.way)
        if case.times == 2:
            time.sleep(1.0)
            command.send(case.number, case.way)
        code = command.process.wait(120)
        took_s = time.monotonic() - began_s
        summary, latest = command.run_dir / "summary.json", command.run_dir / "checkpoints" / "latest"
        return End(
            code=code,
            took_s=took_s,
            status=json.loads(summary.read_text())["status"] if summary.exists() else "",
            steps=command.steps,
            checkpoint=latest.read_text() if latest.exists() else "",
            left=command.find_left(),
        )
    finally:
        for process, _ in find_marked(folder.name):
            os.kill(process, signal.SIGKILL)
        command.process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def find_fault(case: Case, end: End) -> str:
    """What differs from docs/checkpoints.md; empty: nothing."""
    found = []
    if end.code != 130:
        found.append(f"exit code {end.code}")
    if end.took_s > ENDS_WITHIN_S[case.times]:
        found.append("late")
    if end.left:
        found.append(f"left: {', '.join(end.left)}")
    if case.times == 1 and case.stage not in ("composing", "checking") and not end.status:
        found.append("no summary")
    if case.times == 1 and end.steps and end.checkpoint.partition(".")[0] != f"step_{end.steps}":
        found.append("no checkpoint of its last step")
    return "; ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--signals", nargs="+", default=["TERM", "INT", "HUP"])
    parser.add_argument("--stages", nargs="+", default=[*STAGES], choices=[*STAGES])
    parser.add_argument("--ways", nargs="+", default=["process", "group", "all"])
    parser.add_argument("--clusters", nargs="+", default=["inprocess", "ray"])
    parser.add_argument("--times", nargs="+", type=int, default=[1, 2])
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, and would stay so
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    faults = 0
    for stage, cluster, number, way, times in itertools.product(
        args.stages, args.clusters, args.signals, args.ways, args.times
    ):
        case = Case(stage=stage, number=signal.Signals[f"SIG{number}"], way=way, cluster=cluster, times=times)
        try:
            end = try_case(case)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            print(f"{case}: {error}", file=sys.stderr)
            faults += 1
            continue
        fault = find_fault(case, end)
        faults += bool(fault)
        row = (
            f"| {stage} | {cluster} | {number} | {way} | {times} | {end.code} | {end.took_s:.1f} | {end.status or '-'} "
            f"| {end.steps} | {end.checkpoint or '-'} | {fault or 'as documented'} |"
        )
        print(row, flush=True)
        with REPORT.open("a") as report:
            report.write(f"{row}\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
