"""From a run to a plan to a run, by the commands a user types: measured costs, a search, its placement."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SMALL = (
    "+experiment=ppo", "cluster=inprocess", "tracking=none", "tracking.console=false",
    "train.groups_per_batch=4", "train.group_size=4", "data.num_prompts=64", "data.num_eval_prompts=16",
)  # fmt: skip


def launch(cwd: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_run_is_profiled_searched_and_run_again_as_it_was_planned(tmp_path: Path) -> None:
    launch(tmp_path, *SMALL, "train.num_steps=4", "run_dir=first")
    began_s = time.monotonic()
    text = launch(tmp_path, *SMALL, "task=plan", "plan.profile=first", "plan.search=true", "plan.max_candidates=3")
    assert time.monotonic() - began_s < 60
    assert "time of a step (measured in first; " in text
    assert "8 candidates, 0 too large for their slots" in text
    (command,) = [line.split() for line in text.splitlines() if line.strip().startswith("python launch.py")]
    overrides = command[2 : command.index("placement=planned") + 1]
    launch(tmp_path, *overrides, *SMALL[1:], "train.num_steps=2", "run_dir=second")
    ran = (tmp_path / "second/config.yaml").read_text()
    written = (tmp_path / "runs/ppo/plan/placement/planned.yaml").read_text()
    block = "\n".join(f"  {line}" for line in written.splitlines()[1:])
    assert f"placement:\n{block}\n" in ran
