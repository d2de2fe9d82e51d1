"""Whole runs, started as a user does, whose tools and agents hang: the process ends soon after its last file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Forked

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
    "train.group_size=2", "data.num_prompts=16", "data.num_eval_prompts=1", "judge.anchors=4", "judge_monitor.every=0",
)  # fmt: skip
ENDS_WITHIN_S = 60.0  # 10 s on a machine with nothing else to do


def ended(launched: Callable[..., Forked], tmp_path: Path, *overrides: str) -> tuple[dict, Forked]:
    """The summary of a run, which must end soon after it is written."""
    (tmp_path / "hanging_code.py").write_text(SOURCE)
    process = launched(*SMALL, *overrides)
    summary = tmp_path / "run" / "summary.json"
    end_s = time.monotonic() + 200
    while not summary.exists():
        assert process.is_running and time.monotonic() < end_s, process.output
        time.sleep(0.05)
    assert process.wait(ENDS_WITHIN_S) == 0, process.output
    return json.loads(summary.read_text()), process


@pytest.fixture
def launched(forked: type[Forked], tmp_path: Path) -> Callable[..., Forked]:
    """A launch.py that finds modules in tmp_path."""
    launch = str(Path(__file__).parents[2] / "launch.py")
    (tmp_path / "start.py").write_text(f"import runpy\nrunpy.run_path({launch!r}, run_name='__main__')\n")
    return lambda *overrides: forked(tmp_path / "start.py", *overrides, cwd=tmp_path)


def test_a_run_whose_tool_hangs_ends_and_the_policy_reads_it(tmp_path: Path, launched: Callable[..., Forked]) -> None:
    summary, process = ended(
        launched, tmp_path, "+experiment=tools", "env.functions=hanging_code", "env.call_s=0.2",
        "env.max_observation_chars=60", "rollout.max_turns=2",
    )  # fmt: skip
    assert summary["status"] == "completed", summary["failure"]
    assert summary["envs"]["faults"] == {} and summary["envs"]["policy_faults"]["timeout"] > 0
    assert "add did not end within 0.2 s, and was given up" in (tmp_path / "run" / "rollouts.jsonl").read_text()
    assert "a call of hanging_code.add" in process.output


@pytest.mark.long
def test_a_run_whose_agent_hangs_ends(tmp_path: Path, launched: Callable[..., Forked]) -> None:
    summary, process = ended(
        launched, tmp_path, "+experiment=quickstart", "env=workflow", "env.target=hanging_code.solve", "judge=rule",
        "env.episode_s=1", "env.step_s=2", "env.close_s=0.2", "rollout.max_turns=2",
    )  # fmt: skip
    assert summary["status"] == "completed", summary["failure"]
    assert "left without waiting for threads that never ended: of-a-user" in process.output
