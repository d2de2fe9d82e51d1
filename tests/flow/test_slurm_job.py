"""deploy/slurm.sh under a fake Slurm, with a real Ray of two nodes: a run, its end by a signal, its continuation."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_slurm import SlurmJob, end

pytestmark = pytest.mark.long
RUN = (
    "+experiment=quickstart", "tracking=none", "train.groups_per_batch=4", "train.group_size=2",
    "data.num_eval_prompts=4", "data.num_prompts=64", "judge_monitor.anchors=2", "judge_monitor.every=0",
    "train.num_steps=400",
)  # fmt: skip


@pytest.fixture
def ray_tmp() -> Iterator[str]:
    """A folder for Ray, whose sockets' paths may have 107 bytes: pytest's are too long."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.timeout(1500)
def test_a_job_that_runs_out_of_time_continues_from_its_checkpoint_when_it_is_queued_again(
    tmp_path: Path, ray_tmp: str
) -> None:
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "JOIN_S": "300", "RAY_TMPDIR": ray_tmp}
    job = SlurmJob(tmp_path, ["n1", "n2"], Path(sys.prefix), environment)
    began = job.begin(*RUN)
    metrics, deadline = job.run_dir / "metrics.jsonl", time.monotonic() + 400
    while not metrics.exists() or '"time/step_s"' not in metrics.read_text():
        assert began.poll() is None, began.communicate()[0][-3000:]
        assert time.monotonic() < deadline, "no step"
        time.sleep(0.5)
    began.send_signal(signal.SIGUSR1)
    code, output = end(began, 400)
    assert code == 130, output[-3000:]
    assert "scontrol requeue 4711" in job.calls
    assert "PROBLEM" not in output and "problems 0" in output
    steps = json.loads((job.run_dir / "summary.json").read_text())["steps"]
    assert steps >= 1 and (job.run_dir / f"checkpoints/step_{steps}/learner/.metadata").is_file()
    again = job.begin(*RUN[:-1], f"train.num_steps={steps + 1}", restarts=1)
    code, output = end(again, 600)
    assert code == 0, output[-3000:]
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", steps + 1)
    assert f"resumed at step {steps}" in (job.run_dir / "run.log").read_text()
