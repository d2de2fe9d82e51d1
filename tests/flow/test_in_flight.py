"""kill -9 while rollouts of several turns go on: a resume takes them up after their last turn, and nothing changes."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forks import Forked
from safetensors.torch import load_file

pytestmark = pytest.mark.long

TOOLS = '''
import time
replayable = {replayable}

def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    time.sleep(0.05)
    return f"= {{a + b}}"

def sub(a: int, b: int) -> str:
    """The difference of two numbers."""
    time.sleep(0.05)
    return f"= {{a - b}}"
'''
RUN = (
    "+experiment=tools", "cluster=inprocess", "env.functions=slow_tools", "train.deterministic=true",
    "train.max_staleness=1", "train.num_steps=8", "train.groups_per_batch=4", "train.group_size=4",
    "train.checkpoint_every=1", "data.num_eval_prompts=2", "judge_monitor.every=0", "tracking=none", "resume=auto",
)  # fmt: skip
Start = Callable[..., Forked]


def count_turns(run: Path, seen: set[tuple[str, int]]) -> int:
    """The states of files of rollouts that go on which were seen so far."""
    for path in (run / "in_flight").glob("*.jsonl"):
        try:
            seen.add((path.name, path.stat().st_size))
        except FileNotFoundError:  # it has just ended
            continue
    return len(seen)


def run_on(start: Start, tmp_path: Path, name: str, kills: int, *, replayable: bool = True) -> Path:
    """A run that is killed after a random number of turns, again and again, and then completes."""
    (tmp_path / "slow_tools.py").write_text(TOOLS.format(replayable=replayable))
    run, command, draw = tmp_path / name, (*RUN, f"run_dir={name}"), random.Random(7)
    for _ in range(kills):
        process, seen, wanted = start(*command), set[tuple[str, int]](), draw.randint(1, 16)
        before, deadline = count_turns(run, seen), time.monotonic() + 120
        while count_turns(run, seen) < before + wanted:
            assert process.is_running and time.monotonic() < deadline, process.output
            time.sleep(0.002)
        process.signal(signal.SIGKILL)
        process.wait()
    process = start(*command)
    assert process.wait() == 0, process.output
    return run


def list_resumed(run: Path) -> list[int]:
    """How many rollouts each resume took up after their last turn."""
    return [int(number) for number in re.findall(r"; (\d+) more go on after", (run / "run.log").read_text())]


def check_equal(one: Path, other: Path) -> None:
    weights, others = (load_file(run / "policy" / "model.safetensors") for run in (one, other))
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_thirty_kills_at_random_turns_end_in_the_weights_of_the_undisturbed_run(
    launched: Start, tmp_path: Path
) -> None:
    undisturbed = run_on(launched, tmp_path, "undisturbed", 0)
    killed = run_on(launched, tmp_path, "killed", 30)
    check_equal(undisturbed, killed)
    assert sum(list_resumed(killed)) >= 30
    summary = json.loads((killed / "summary.json").read_text())
    assert summary["steps"] == 8 and not (killed / "in_flight").exists()


def test_tools_that_may_not_be_repeated_are_not(launched: Start, tmp_path: Path) -> None:
    run = run_on(launched, tmp_path, "run", 0, replayable=False)
    assert not (run / "in_flight").exists() and list_resumed(run) == []
