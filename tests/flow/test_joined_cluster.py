"""A Ray with another working directory than the driver: files are in the run's directory, processes have what they
need.

One Ray for all tests. Its two GPUs are only declared.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from grmpipe.tiny.resolve import SHIPPED

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long


@dataclass(frozen=True, slots=True)
class Joined:
    """A running Ray, and the environment of its processes."""

    address: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    """Its raylet has its own working directory."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "token").write_text("0" * 32)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **token}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    head = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}",
            "--node-ip-address=127.0.0.1", "--num-cpus=4", "--num-gpus=2", "--include-dashboard=false",
            "--object-store-memory=100000000",
        ],
        cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not answers(port):
            assert head.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield Joined(f"127.0.0.1:{port}", environment)
    finally:
        head.terminate()
        head.wait(60)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def launch(cwd: Path, joined: Joined, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, str(ROOT / "launch.py"), "+experiment=quickstart", f"cluster.address={joined.address}",
        "tracking=none", "train.num_steps=1", "train.groups_per_batch=2", "train.group_size=2",
        "data.num_eval_prompts=4", "data.num_prompts=32", "judge_monitor.anchors=2", "judge_monitor.every=0",
        *overrides,
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=cwd, env={**joined.environment, **environment},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def test_files_of_a_run_are_where_the_run_is(joined: Joined, tmp_path: Path) -> None:
    """The policy is given by its hub name; the processes find the hub's cache by a variable that is passed on."""
    snapshot = tmp_path / "hf/hub/models--Some--Model/snapshots/abc"
    shutil.copytree(SHIPPED / "policy", snapshot)
    (tmp_path / "hf/hub/models--Some--Model/refs").mkdir()
    (tmp_path / "hf/hub/models--Some--Model/refs/main").write_text("abc")
    overrides = ("policy.path=Some/Model", "run_dir=run", "cluster.env_vars=[HF_HOME,HF_HUB_OFFLINE]")
    result = launch(tmp_path, joined, *overrides, HF_HOME=str(tmp_path / "hf"))
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "run/checkpoints/step_1/learner/.metadata").is_file()
    assert (tmp_path / "run/policy/tokenizer.json").is_file()
    assert list((tmp_path / "run/policy").glob("*.safetensors"))
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "completed"
    assert not list((tmp_path / "run").glob(".shared-*"))
    assert str(tmp_path / "hf") not in (tmp_path / "run/config.yaml").read_text(), "names alone, no values"


def test_a_run_dir_that_is_another_folder_elsewhere_is_refused_before_training(joined: Joined, tmp_path: Path) -> None:
    """/proc/self/cwd is a different folder in each process, like a local disk of each machine."""
    result = launch(tmp_path, joined, "run_dir=/proc/self/cwd/run")
    assert result.returncode == 2, result.stderr[-3000:]
    assert "run_dir: the machines of cluster.address don't share /proc/self/cwd/run" in result.stderr
    assert not (tmp_path / "run/checkpoints").exists()


def test_processes_on_gpus_have_their_share_of_the_cores(joined: Joined) -> None:
    command = [sys.executable, str(Path(__file__).with_name("gpu_seat_process.py")), joined.address]
    told = subprocess.run(
        command, env=joined.environment, capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert told.stdout.split() == ["2"], f"4 cores for 2 GPUs; Ray itself would give 1\n{told.stderr[-3000:]}"
