"""From a plan to a run, by the commands that a user types: a search, its placement."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from forks import Forked

SMALL = (
    "+experiment=ppo", "cluster=inprocess", "tracking=none", "tracking.console=false",
    "train.groups_per_batch=4", "train.group_size=4", "data.num_prompts=64", "data.num_eval_prompts=4",
)  # fmt: skip


def test_a_run_is_searched_and_run_as_it_was_planned(tmp_path: Path, launched: Callable[..., Forked]) -> None:
    def launch(*arguments: str) -> str:
        process = launched(*arguments)
        assert process.wait() == 0, process.output
        return process.output

    began_s = time.monotonic()
    text = launch(*SMALL, "task=plan", "plan.search=true", "plan.max_candidates=3")
    assert time.monotonic() - began_s < 60
    assert "time of a step (estimated from the devices' data sheets; " in text
    assert "8 candidates, 0 too large for their slots" in text
    (added,) = [line.split() for line in text.splitlines() if line.strip().startswith("--config-dir")]
    launch(*added, *SMALL, "train.num_steps=2", "run_dir=planned")
    ran = (tmp_path / "planned/config.yaml").read_text()
    written = (tmp_path / "runs/ppo/plan/placement/planned.yaml").read_text()
    block = "\n".join(f"  {line}" for line in written.splitlines()[1:])
    assert f"placement:\n{block}\n" in ran
