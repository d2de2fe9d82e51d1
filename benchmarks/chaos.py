"""Faults at random in real runs: after each the run goes on, or ends with a cause and is resumed, and nothing is lost.

    python benchmarks/chaos.py --minutes 30 --seed 1 [--only jury tools] [--folder runs/chaos]
    python benchmarks/chaos.py --minutes 30 --seed 1 --virtual    # the pipeline alone, on a virtual clock

Each run of a few steps gets up to three faults: signals to its driver and its processes, answers of its judge's
endpoint, its environments, full disks (as root), damaged files. Whatever ends is resumed until it is complete; then
its files must hold (benchmarks/faults/ledger.py), and no process and no temporary file of it may be left. Appends a
row to benchmarks/chaos.md. Exit code 1 if anything was lost; the folders of such runs are kept, all others removed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from faults.endpoint import HostileEndpoint, find_made_up
from faults.ledger import Ledger
from faults.process_faults import (
    AT_REST,
    CLOCK,
    KILL,
    MARK,
    OUT_OF_MEMORY,
    READ_ONLY,
    Strike,
    Target,
    find_marked,
    memory_group,
    remount,
    strikes_on,
)
from faults.scenarios import NUM_SIBLINGS, SCENARIOS, Scenario, prepare

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "chaos.md"
OWN_ENDS, ENDS_AFTER_S = (0, 1, 2, 130), 10.0  # a process that ends by itself does so soon after its last word
OF_LIBRARIES = ("ray", "torchinductor", "vllm_dist_")  # logs, a cache, and a store that a killed process can't remove
LEFT_AFTER_S = 30.0  # processes may still end: Ray's agents notice a dead raylet after some 15 s
SECOND = "a second start"  # in a start it may come first, and be the run
MAX_STARTS = 12
RUN, TEMPORARY, RUN_MB = "disk", "t", 64  # the disks of the run's directory and of its temporary files
CLOCK_FOLDER = ROOT / "benchmarks" / "faults" / "clock"


@dataclass
class Outcome:
    """One run: its faults as (kind, target), how its processes ended, and what was lost."""

    scenario: str
    seed: str
    faults: list[tuple[str, str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class ChaoticRun:
    """A run with faults, from its first start until it is complete.

    strikes: the faults to choose from while it goes on, by kind. so_far: how often each struck in earlier runs: those
    that struck least often come first.
    """

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        seed: str,
        overrides: Sequence[str],
        strikes: Mapping[str, Strike],
        so_far: Counter[str],
        memory: Path | None = None,
    ) -> None:
        self.outcome = Outcome(scenario.name, seed)
        self._random = random.Random(f"chaos {seed}")
        self._folder, self.run_dir, self._mark = folder, folder / RUN / "run", f"{os.getpid()}-{seed}"
        self._strikes, self._so_far, self._memory = strikes, so_far, memory
        self._left = self._random.randint(1, 3)  # faults
        self._limit_s = scenario.limit_s
        self._signals, self._struck_in_start = 0, False  # of the present process
        self._was_full = self._read_only = False
        launch = str(ROOT / "launch.py")
        joins = () if memory is None else ("sh", "-c", f'echo $$ > {memory}/cgroup.procs && exec "$@"', "sh")
        self._command = [*joins, sys.executable, launch, *overrides, f"run_dir={self.run_dir}", "resume=auto"]
        (clock := folder / "clock").write_bytes(bytes(8))
        paths = {"PYTHONPATH": f"{CLOCK_FOLDER}:{ROOT}", "TMPDIR": str(folder / TEMPORARY), CLOCK: str(clock)}
        settings = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        self._environment = {**os.environ, **paths, **settings, MARK: self._mark}

    def play(self) -> Outcome:
        for _ in range(MAX_STARTS):
            if (code := self._start()) == 0:
                break
            if not self._may_go_on(code):
                return self.outcome
            self._strike_at_rest()
            if self._read_only:
                self._start_read_only()
        else:
            self.outcome.lost.append(f"not complete after {MAX_STARTS} starts")
            return self.outcome
        self.outcome.lost += Ledger(self.run_dir, has_gaps=self._was_full).find_losses()
        self.outcome.lost += list(self._list_left())
        return self.outcome

    def _start_read_only(self) -> None:
        """A start that can't write its files ends at once, and says why."""
        refused = subprocess.run(
            self._command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            timeout=self._limit_s,
            check=False,
        )
        self.outcome.ends.append(str(refused.returncode))
        if refused.returncode not in (1, 2) or b"Read-only file system" not in refused.stdout + refused.stderr:
            said = (refused.stdout + refused.stderr).decode(errors="replace")[-1500:]
            self.outcome.lost.append(f"on a read-only disk: exit code {refused.returncode}: {said}")
        self._read_only = not remount(self.run_dir.parent, "rw")

    def _start(self) -> int | None:
        """Start it, strike while it goes on. Returns the exit code; None if it hangs."""
        with (self._folder / "output.txt").open("ab") as log:
            process = subprocess.Popen(
                self._command, cwd=self._folder, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        began_s = time.monotonic()
        target = Target(
            process=process,
            run_dir=self.run_dir,
            output=self._folder / "output.txt",
            command=self._command,
            environment=self._environment,
            memory=self._memory,
        )
        self._signals, self._struck_in_start, log_before = 0, False, self._log_size()
        while self._left and self._await_moment(target, began_s):
            in_start = self._log_size() == log_before
            self._struck_in_start |= in_start
            self._strike(target, [kind for kind in self._strikes if not (in_start and kind == SECOND)])
        still_runs = target.is_running
        try:
            code = process.wait(max(1.0, self._limit_s - (time.monotonic() - began_s)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, KILL)
            return None
        silent_s = time.time() - (self._folder / "output.txt").stat().st_mtime
        if still_runs and code in OWN_ENDS and silent_s > ENDS_AFTER_S:
            self.outcome.lost.append(f"exit code {code} came {silent_s:.0f} s after the last word")
        self.outcome.ends.append(str(code))
        return code

    def _await_moment(self, target: Target, began_s: float) -> bool:
        """Wait for a random moment, of the start or when so many rollouts are on file. False if it ended before."""
        wanted, in_start = self._random.randint(0, NUM_SIBLINGS), self._random.random() < 0.25
        until_s, journal = began_s + self._random.uniform(0, 8), self.run_dir / "rollouts.jsonl"
        while target.is_running and time.monotonic() - began_s < self._limit_s / 2:
            if in_start and time.monotonic() > until_s:
                return True
            if not in_start and journal.exists() and journal.read_bytes().count(b"\n") >= wanted:
                time.sleep(self._random.uniform(0, 0.5))
                return target.is_running
            time.sleep(0.02)
        return False

    def _strike(self, target: Target, kinds: Sequence[str]) -> None:
        """Strike by that of the kinds that struck least often so far and has a target."""
        for kind in self._in_turn(kinds):
            if (hit := self._strikes[kind](target, self._random)) is not None:
                break
        else:
            return
        self._left -= 1
        self._signals += (hit == "driver" and kind != "SIGSTOP and SIGCONT") or kind == OUT_OF_MEMORY
        self._was_full |= kind == "a full disk"
        self._note(kind, hit)
        if "not refused" in hit:
            self.outcome.lost.append(hit)

    def _in_turn(self, kinds: Iterable[str]) -> list[str]:
        """Those that struck least often first."""
        return sorted(sorted(kinds), key=lambda kind: (self._so_far[kind], self._random.random()))

    def _note(self, kind: str, hit: str) -> None:
        self._so_far[kind] += 1
        self.outcome.faults.append((kind, hit))

    def _may_go_on(self, code: int | None) -> bool:
        """Whether a process ended as it may: by our kill, interrupted, or failed with a cause on file."""
        if code is None:
            self.outcome.lost.append(f"a process did not end within {self._limit_s:.0f} s")
            return False
        summary, said = self.run_dir / "summary.json", (self._folder / "output.txt").read_text(errors="replace")
        if code in (-KILL, 130):
            return self._signals > 0
        # A signal before the run takes them, after its end, and a second one end the process at once.
        tail = said[-1500:]
        unwritten = "summary.json could not be written: No space left" in tail
        if code < 0 and (self._signals > 1 or self._struck_in_start or summary.exists() or unwritten):
            return True
        if code == 1 and summary.exists() and json.loads(summary.read_text()).get("failure"):
            return True
        if code == 1 and unwritten:
            return True
        if code == 2 and self._was_full and "can't be written to ([Errno 28] No space left" in tail:
            return True
        self.outcome.lost.append(f"exit code {code}: {tail}")
        return False

    def _log_size(self) -> int:
        log = self.run_dir / "run.log"
        return log.stat().st_size if log.exists() else 0

    def _strike_at_rest(self) -> None:
        if not self.run_dir.is_dir() or self._random.random() < 0.2:
            return
        for kind in self._in_turn(AT_REST):
            if (hit := AT_REST[kind](self.run_dir, self._random)) is not None:
                self._note(kind, hit)
                self._read_only = kind == READ_ONLY
                return

    def _list_left(self) -> Iterator[str]:
        """Processes and temporary files that the run has left."""
        until_s = time.monotonic() + LEFT_AFTER_S
        while (left := dict(find_marked(self._mark))) and time.monotonic() < until_s:
            time.sleep(0.2)
        for process, command in left.items():
            yield f"a process is left: {process} {command[:200]!r}"
        for path in (self._folder / TEMPORARY).iterdir():
            if not path.name.startswith(OF_LIBRARIES):
                yield f"a temporary file is left: {path.name}"


@contextmanager
def small_disk(folder: Path, size_mb: int) -> Iterator[bool]:
    """Context with a small disk of its own there, where we may mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def play(scenario: Scenario, home: Path, seed: str, so_far: Counter[str]) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=home))
    with ExitStack() as stack:
        for name, size_mb in ((RUN, RUN_MB), (TEMPORARY, scenario.temporary_mb)):
            (folder / name).mkdir()
            if random.Random(f"{name} {seed}").random() < 0.6:
                stack.enter_context(small_disk(folder / name, size_mb))
        number = int.from_bytes(random.Random(f"run {seed}").randbytes(2))
        overrides, endpoint = stack.enter_context(prepare(scenario, number))
        memory = stack.enter_context(memory_group(folder.name))
        outcome = ChaoticRun(scenario, folder, seed, overrides, strikes_on(scenario), so_far, memory).play()
        add_own_faults(outcome, folder / RUN / "run", endpoint)
        if outcome.lost:
            shutil.copytree(folder / RUN, folder / "kept", dirs_exist_ok=True)
    if not outcome.lost:
        shutil.rmtree(folder)
    else:
        outcome.lost.append(f"see {folder}")
    return outcome


def add_own_faults(outcome: Outcome, run_dir: Path, endpoint: HostileEndpoint | None) -> None:
    """Those of the endpoint and of the environments, which strike by themselves."""
    if endpoint is not None:
        outcome.faults += [(f"the endpoint: {kind}", "judge") for kind in endpoint.done.elements()]
        outcome.lost += find_made_up(run_dir) if outcome.ends[-1:] == ["0"] else []
    if (summary := run_dir / "summary.json").exists():
        faults = json.loads(summary.read_text()).get("envs", {}).get("faults", {})
        outcome.faults += [(f"an environment: {cause}", "episode") for cause in Counter(faults).elements()]


def report(outcomes: Sequence[Outcome], seed: int, minutes: float) -> str:
    faults = Counter(kind for outcome in outcomes for kind, _ in outcome.faults)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    ends = Counter(end for outcome in outcomes for end in outcome.ends)
    lost = sum(bool(outcome.lost) for outcome in outcomes)
    kinds = "; ".join(f"{kind} {count}" for kind, count in sorted(faults.items()))
    ended = ", ".join(f"{code}: {count}" for code, count in sorted(ends.items()))
    cells = (seed, commit.stdout.strip(), f"{minutes:.0f}", len(outcomes), faults.total(), lost, ended, kinds)
    return f"| {' | '.join(map(str, cells))} |\n"


def play_virtually(seed: int, minutes: float, *, reports: bool) -> int:
    from faults.virtual import play_worlds  # needs what the tests need

    faults, num_worlds, broken = play_worlds(seed, minutes)
    for line in broken:
        print(f"LOST {line}")
    print(f"{faults.total():,} faults in {num_worlds:,} runs: {dict(faults)}")
    outcomes = [Outcome("virtual", str(seed), lost=[line]) for line in broken]
    outcomes += [Outcome("virtual", str(seed)) for _ in range(num_worlds - len(broken))]
    outcomes[0].faults += [(kind, "engine") for kind in faults.elements()]
    if reports:
        append(report(outcomes, seed, minutes))
    return int(bool(broken))


def count_faults(text: str) -> Counter[str]:
    """How often each kind struck, by the rows of a report."""
    so_far = Counter[str]()
    for row in text.splitlines():
        for fault in row.rstrip("| ").rpartition("|")[2].split(";"):
            kind, _, count = fault.strip().rpartition(" ")
            if count.isdecimal():
                so_far[kind] += int(count)
    return so_far


def append(row: str) -> None:
    with REPORT.open("a", encoding="utf-8") as file:
        file.write(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=10**6, help="end after so many runs")
    parser.add_argument("--only", nargs="*", default=[], help="scenarios: " + ", ".join(one.name for one in SCENARIOS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--no-report", action="store_true")
    parser.add_argument("--virtual", action="store_true")
    args = parser.parse_args()
    if args.virtual:
        return play_virtually(args.seed, args.minutes, reports=not args.no_report)
    scenarios = [one for one in SCENARIOS if not args.only or one.name in args.only]
    args.folder.mkdir(parents=True, exist_ok=True)
    outcomes, so_far = list[Outcome](), count_faults(REPORT.read_text(encoding="utf-8"))
    began_s = time.monotonic()
    while time.monotonic() - began_s < 60 * args.minutes and len(outcomes) < args.runs:
        number = len(outcomes)
        outcome = play(scenarios[number % len(scenarios)], args.folder, f"{args.seed}/{number}", so_far)
        outcomes.append(outcome)
        own = [kind for kind, _ in outcome.faults if ":" in kind]
        struck = ", ".join([*(kind for kind, _ in outcome.faults if ":" not in kind), f"{len(own)} of its own"])
        print(f"{outcome.seed} {outcome.scenario}: {struck} -> exits {', '.join(outcome.ends)}", flush=True)
        for line in outcome.lost:
            print(f"    LOST {line}", flush=True)
    minutes = (time.monotonic() - began_s) / 60
    faults = sum(len(outcome.faults) for outcome in outcomes)
    print(f"{faults} faults in {len(outcomes)} runs, {faults / minutes:.1f} a minute")
    if not args.no_report:
        append(report(outcomes, args.seed, minutes))
    return int(any(outcome.lost for outcome in outcomes))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
