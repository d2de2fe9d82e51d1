"""Whole runs, started as a user does, whose tools and agents hang: the process ends soon after its last file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from forks import Forked

from grmpipe.envs.sandbox.crash_cleanup import read_start
from grmpipe.envs.sandbox.supervisor import descendants

SOURCE = '''
"""A user's tools and agent, which wait for what never comes."""

import asyncio
import threading
import time


__all__ = ["add", "sub"]


def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    threading.Event().wait()


def sub(a: int, b: int) -> str:
    """The difference of two numbers."""
    return f"= {a - b}"


async def solve(task, policy):
    await policy.chat(task.messages)
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)
    threading.Thread(target=time.sleep, args=(1000,), name="of-a-user").start()
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass  # a retry around everything
'''
SMALL = (
    "cluster=inprocess", "run_dir=run", "tracking=none", "train.num_steps=1", "train.groups_per_batch=2",
    "train.group_size=2", "data.num_prompts=16", "data.num_eval_prompts=1", "judge_monitor.anchors=4",
    "judge_monitor.every=0",
)  # fmt: skip
QUIET_S = 10.0  # within which a process ends, on a machine with nothing else to do
LIMIT_S = 60.0  # on any machine
POLL_S = 0.05
# Runs launch.py in a session of its own, and notes the threads that are left after its last line.
START = """
import json, os, runpy, threading
from grmpipe.run import signals

os.setsid()
leave = signals.leave

def note_and_leave(code):
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    with open("threads.json", "w") as file:
        json.dump(left, file)
    leave(code)

signals.leave = note_and_leave
runpy.run_path({launch!r}, run_name="__main__")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run ended. threads: that were left after its last line. started: all processes that it ever had."""

    summary: dict
    output: str
    threads: list[str]
    started: set[int]


def ended(launched: Callable[..., Forked], tmp_path: Path, *overrides: str) -> End:
    """A run, which must end soon after its summary is written, with all that it started."""
    (tmp_path / "hanging_code.py").write_text(SOURCE)
    process = launched(*SMALL, *overrides)
    summary = tmp_path / "run" / "summary.json"
    started: dict[int, str] = {}
    end_s = time.monotonic() + 200
    while not summary.exists():
        assert process.is_running and time.monotonic() < end_s, process.output
        note_descendants(process.pid, started)
        time.sleep(POLL_S)
    written_s, loads = time.monotonic(), [1.0]
    while process.is_running and time.monotonic() < written_s + LIMIT_S:
        note_descendants(process.pid, started)
        loads.append(running_per_core())
        time.sleep(POLL_S)
    took_s = time.monotonic() - written_s
    assert process.wait(POLL_S) == 0, process.output
    assert took_s < QUIET_S * max(1.0, sum(loads) / len(loads)), f"{took_s:.1f} s"
    end_s = time.monotonic() + 1
    while left := [one for one, start in started.items() if read_start(one) == start] + session_of(process.pid):
        assert time.monotonic() < end_s, [Path(f"/proc/{one}/cmdline").read_bytes() for one in left]
        time.sleep(POLL_S)
    threads = json.loads((tmp_path / "threads.json").read_text())
    return End(summary=json.loads(summary.read_text()), output=process.output, threads=threads, started=set(started))


def note_descendants(process: int, started: dict[int, str]) -> None:
    started |= {one: start for one in descendants(process) if (start := read_start(one))}


def running_per_core() -> float:
    """Threads of this machine that run or want to, at this moment."""
    running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
    return int(running) / len(os.sched_getaffinity(0))


def session_of(leader: int) -> list[int]:
    """Processes of a session that live."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            state, *values = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if folder.name.isdigit() and state not in "ZX" and int(values[2]) == leader:
                found.append(int(folder.name))
    return found


@pytest.fixture
def launched(forked: type[Forked], tmp_path: Path) -> Callable[..., Forked]:
    """A launch.py that finds modules in tmp_path."""
    (tmp_path / "start.py").write_text(START.format(launch=str(Path(__file__).parents[2] / "launch.py")))
    return lambda *overrides: forked(tmp_path / "start.py", *overrides, cwd=tmp_path)


def test_a_run_whose_tool_hangs_ends_and_the_policy_reads_it(tmp_path: Path, launched: Callable[..., Forked]) -> None:
    end = ended(
        launched, tmp_path, "+experiment=tools", "env.functions=hanging_code", "env.call_s=0.2",
        "env.max_observation_chars=60", "rollout.max_turns=2",
    )  # fmt: skip
    assert end.summary["status"] == "completed", end.summary["failure"]
    assert end.summary["envs"]["faults"] == {} and end.summary["envs"]["policy_faults"]["timeout"] > 0
    assert "add did not end within 0.2 s, and was given up" in (tmp_path / "run" / "rollouts.jsonl").read_text()
    assert "a call of hanging_code.add" in end.output
    assert {name.partition(" (")[0] for name in end.threads} == {"call of hanging_code.add"}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="processes are confined on Linux only")
def test_a_run_whose_isolated_tool_hangs_ends_with_all_its_processes(
    tmp_path: Path, launched: Callable[..., Forked]
) -> None:
    end = ended(
        launched, tmp_path, "+experiment=tools", "env.functions=hanging_code", "env.call_s=0.2", "env.step_s=1",
        "rollout.max_turns=2", "env.isolation.kind=process", f"env.isolation.read=[{tmp_path}]",
    )  # fmt: skip
    assert end.summary["status"] == "completed", end.summary["failure"]
    assert end.started and end.summary["envs"]["policy_faults"] and end.threads == []


@pytest.mark.long
@pytest.mark.parametrize("place", ["inprocess", "process"])
def test_a_run_whose_agent_hangs_ends(tmp_path: Path, launched: Callable[..., Forked], place: str) -> None:
    episode_s = 1 if place == "inprocess" else 3  # a process takes a while to start
    end = ended(
        launched, tmp_path, "+experiment=quickstart", "env=workflow", "env.target=hanging_code.solve", "judge=rule",
        f"env.episode_s={episode_s}", f"env.step_s={2 * episode_s}", "env.close_s=0.2", "rollout.max_turns=2",
        f"env.runs_in={place}",
    )  # fmt: skip
    assert end.summary["status"] == "completed", end.summary["failure"]
    if place == "inprocess":
        assert set(end.threads) == {"of-a-user", "default-executor"}
        assert "left without waiting for threads that never ended: of-a-user" in end.output
    else:
        assert end.started and end.threads == []
